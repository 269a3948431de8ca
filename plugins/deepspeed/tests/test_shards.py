"""Gradients under ZeRO-3, from a backward to the shards that a rank keeps."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from streams import Stream, Streams, seen_by
from torch import nn

from rlhf.testing.problem import configure
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.patches import stage_3
from rlhf_plugin_deepspeed.patches.install import restore_modules
from rlhf_plugin_deepspeed.patches.stage_3 import (
    MissingGradients,
    deepspeed_reduce_scatter,
    keep_shards,
    ordered,
    reduce_at_once,
    reduce_scatter,
)
from rlhf_plugin_deepspeed.prepare import _some_empty


def shards_of_means(sizes):
    """By our collective and by DeepSpeed's."""
    backend = DeepSpeedBackend()
    mesh = backend.setup_mesh(configure(DeepSpeedConfig(stage=3)))
    torch.manual_seed(mesh.rank)
    tensors = [torch.randn(size) for size in sizes]
    found = [
        [item.clone() for item in function([item.clone() for item in tensors], None)]
        for function in (reduce_scatter, deepspeed_reduce_scatter)
    ]
    backend.close_mesh(mesh)
    return found


@pytest.mark.parametrize("sizes", [[(4, 3), (2,), (6,)], [(4, 3), (3,)], [(8,)]], ids=str)
def test_shards_of_means_are_deepspeeds(pair, sizes):
    for own, other in pair.run(shards_of_means, sizes):
        assert len(own) == len(sizes)
        for first, second in zip(own, other, strict=True):
            assert torch.equal(first, second)


def test_shards_add_up_over_micro_batches():
    held = {0: torch.zeros(4), 1: torch.zeros(3), 2: torch.zeros(2)}
    optimizer = SimpleNamespace(micro_step_id=0)
    parameters = [nn.Parameter(torch.zeros(8)) for _ in held]
    for number, parameter in enumerate(parameters):
        parameter.ds_id = number
    # The second is padded, and this rank has nothing of the third.
    first = [torch.arange(4.0), torch.ones(2), torch.empty(0)]
    for micro_step in range(2):
        optimizer.micro_step_id = micro_step
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        keep_shards(optimizer, held, parameters, first)
        assert all(parameter.grad is None for parameter in parameters)
    assert torch.equal(held[0], 2 * torch.arange(4.0))
    assert held[1].tolist() == [2, 2, 0]
    assert held[2].tolist() == [0, 0]


def test_the_host_does_not_wait_for_the_last_reduction(monkeypatch):
    waited_for = []
    compute = SimpleNamespace(wait_stream=waited_for.append)
    monkeypatch.setattr(get_accelerator(), "current_stream", lambda: compute)
    reduction = ordered(SimpleNamespace)
    reduction.synchronize()
    assert waited_for == [reduction]


@pytest.mark.parametrize(
    "apart", [{"offload_optimizer": True}, {"all2all_process_group": object()}], ids=" ".join
)
def test_gradients_that_go_to_the_host_or_by_other_collectives_go_deepspeeds_way(apart):
    optimizer = SimpleNamespace(**{"offload_optimizer": False} | apart)
    reduce_at_once(optimizer)
    restore_modules()
    assert not hasattr(optimizer, "partition_grads")


@pytest.mark.parametrize(
    ("size", "ranks", "empty"), [(1, 1, False), (1, 2, True), (6, 4, True), (7, 4, False)]
)
def test_shards_without_an_element(size, ranks, empty):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(size))
    assert _some_empty(module, ranks) is empty


class Shard:
    """A parameter of which this rank holds three elements."""

    dtype = torch.float32

    def partition_numel(self):
        return 3


def test_zeros_wait_for_the_update_and_are_waited_for(monkeypatch):
    accelerator = Streams()
    stream = Stream("reduction", accelerator.seen)
    stream.synchronize = lambda: accelerator.seen.append("compute waits for reduction")
    optimizer = SimpleNamespace(
        micro_step_id=0, offload_optimizer=False, reduce_and_partition_stream=stream,
        partition_grads=lambda params_to_release, grad_partitions: accelerator.seen.append(
            f"{[part.tolist() for part in grad_partitions]} on {accelerator.current.name}"
        ),
        independent_gradient_partition_epilogue=lambda: accelerator.seen.append("end"),
    )  # fmt: skip
    monkeypatch.setattr(stage_3, "get_accelerator", lambda: accelerator)
    MissingGradients(optimizer)
    finish = optimizer.independent_gradient_partition_epilogue

    shard = Shard()

    def with_gradient():
        optimizer.partition_grads([shard], [torch.ones(3)])
        finish()

    zeros = [
        "end", "reduction waits for compute", "[[0.0, 0.0, 0.0]] on reduction",
        "compute waits for reduction",
    ]  # fmt: skip
    assert seen_by(accelerator, finish, with_gradient, finish) == [
        ["end"],
        ["[[1.0, 1.0, 1.0]] on compute", "end"],
        zeros,
    ]
    optimizer.micro_step_id = 1
    assert seen_by(accelerator, finish) == [["end"]]
    optimizer.offload_optimizer = True
    assert seen_by(accelerator, finish) == [zeros]
