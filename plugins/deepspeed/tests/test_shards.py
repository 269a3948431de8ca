"""Gradients under ZeRO-3, from a backward to the shards that a rank keeps."""

from types import SimpleNamespace

import pytest
import torch
from streams import Stream, Streams, seen_by
from torch import nn

from rlhf_plugin_deepspeed.patches import stage_3
from rlhf_plugin_deepspeed.patches.stage_3 import MissingGradients
from rlhf_plugin_deepspeed.prepare import _some_empty


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
        micro_step_id=0,
        offload_optimizer=False,
        reduce_and_partition_stream=stream,
        partition_grads=lambda params_to_release, grad_partitions: accelerator.seen.append(
            f"{[part.tolist() for part in grad_partitions]} on {accelerator.current.name}"
        ),
        independent_gradient_partition_epilogue=lambda: accelerator.seen.append("end"),
    )
    monkeypatch.setattr(stage_3, "get_accelerator", lambda: accelerator)
    MissingGradients(optimizer)
    finish = optimizer.independent_gradient_partition_epilogue

    shard = Shard()

    def with_gradient():
        optimizer.partition_grads([shard], [torch.ones(3)])
        finish()

    zeros = [
        "end",
        "reduction waits for compute",
        "[[0.0, 0.0, 0.0]] on reduction",
        "compute waits for reduction",
    ]
    assert seen_by(accelerator, finish, with_gradient, finish) == [
        ["end"],
        ["[[1.0, 1.0, 1.0]] on compute", "end"],
        zeros,
    ]
    optimizer.micro_step_id = 1
    assert seen_by(accelerator, finish) == [["end"]]
    optimizer.offload_optimizer = True
    assert seen_by(accelerator, finish) == [zeros]
