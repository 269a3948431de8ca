"""Gradients of ZeRO 1 and 2, reduced beside backward: real DeepSpeed on two ranks, and whom streams
wait for."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from streams import Stream, Streams, seen_by
from torch import distributed, nn
from uneven import Changed, case_of, train

from rlhf.errors import RLHFError
from rlhf_devkit.problem import ROWS, losses, make_batch, start
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.patches import stages_1_and_2
from rlhf_plugin_deepspeed.patches.stages_1_and_2 import backward_order

A_WEIGHT = 512
"""Elements of each of the tiny model's, all larger than a bucket of 400."""


@contextmanager
def reductions_in(calls):
    """Append the number of elements of every reduction in the block to `calls`."""
    all_reduce = distributed.all_reduce

    def record(tensor, **options):
        calls.append(tensor.numel())
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_1_and_2, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(stages_1_and_2.distributed, "all_reduce", record)
        yield


@pytest.mark.parametrize("stage", [1, 2])
def test_the_curve_is_the_same_in_buckets_of_any_size(pair, stage):
    whole, _ = pair.run(train, {"stage": stage, "bucket_size": 10**6})
    for size in (400, A_WEIGHT, 1100):
        assert pair.run(train, {"stage": stage, "bucket_size": size}) == [whole] * 2


def reduced(settings):
    """What is reduced in the last two micro-batches of a step."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of(settings))
    found = []
    for last in (False, True):
        calls = []
        with reductions_in(calls):
            loss = engine(make_batch(0, [mesh.rank], engine.device), losses)["loss"].sum()
            engine.backward(loss, last=last)
        found.append(calls)
    backend.close_mesh(mesh)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_each_gradient_is_summed_once(pair, stage):
    # Two weights of each layer and the embedding, which is the head; then norms and biases.
    every = [*[A_WEIGHT] * 5, 160]
    for calls in pair.run(reduced, {"stage": stage, "bucket_size": 400}):
        # Stage 1 keeps whole gradients until the last.
        assert calls == [every if stage == 2 else [], every]


def reduced_beside(offload):
    """What streams do in a backward pass, in buckets that hold norms and no weight."""
    backend, accelerator = DeepSpeedBackend(), Streams()
    settings = {"stage": 2, "bucket_size": 400, "offload_optimizer": offload}
    mesh, engine, _ = start(backend, case_of(settings))
    optimizer = engine.deepspeed.optimizer
    optimizer.reduction_stream = Stream("reduction", accelerator.seen)
    loss = engine(make_batch(0, [0, 1], engine.device), losses)["loss"].sum()
    all_reduce = distributed.all_reduce

    def record(tensor, **options):
        accelerator.seen.append(f"{tensor.numel()} on {accelerator.current.name}")
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_1_and_2, "get_accelerator", lambda: accelerator)
        patch.setattr(stages_1_and_2, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(stages_1_and_2.distributed, "all_reduce", record)
        patch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: accelerator.seen.append(f"{tensor.numel()} for {stream.name}"),
        )
        (found,) = seen_by(accelerator, lambda: engine.backward(loss, last=True))
    backend.close_mesh(mesh)
    return found, optimizer.overlap_comm


def test_compute_waits_for_reductions_and_keeps_the_tensors_that_they_read(pair):
    waits = ["reduction waits for compute", "compute waits for reduction"]
    kept = f"{A_WEIGHT} for reduction"
    found, overlaps = pair.run(reduced_beside, False)[0]
    assert overlaps
    assert found == [
        *(*waits, kept, "512 on reduction") * 5,
        # What is in a bucket stays until the step.
        *(*waits, "160 on reduction"),
        "compute waits for reduction",
    ]


def test_with_the_optimizer_on_the_host_reductions_are_in_line(pair):
    found, overlaps = pair.run(reduced_beside, True)[0]
    assert not overlaps
    assert found == [f"{size} on compute" for size in (*[512] * 5, 160)]


def overlaps(changes, settings):
    """Whether DeepSpeed reduces on a stream of its own."""
    backend = Changed(changes)
    mesh, engine, _ = start(backend, case_of(settings))
    backend.close_mesh(mesh)
    return engine.deepspeed.optimizer.overlap_comm


@pytest.mark.parametrize("stage", [1, 2])
def test_nothing_overlaps_copies_to_the_host(pair, stage):
    on_host = {"stage": stage, "offload_optimizer": True}
    changes = {"zero_optimization": {"overlap_comm": True}}
    assert pair.run(overlaps, changes, {"stage": stage}) == [True] * 2
    assert pair.run(overlaps, changes, on_host) == [False] * 2


def tiled(settings):
    """The norm where DeepSpeed runs a layer's products on tiles of the rows."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of(settings))
    for layer in engine.module.model.layers:
        layer.forward = partial(in_tiles, layer)
    rows = list(range(mesh.rank, ROWS, 2))
    loss = engine(make_batch(0, rows, engine.device), losses)["loss"].sum() / ROWS
    engine.backward(loss, last=True)
    norm = engine.step().read().grad_norm
    backend.close_mesh(mesh)
    return norm


def in_tiles(layer, hidden):
    def products(layer, hidden):
        return layer.down(torch.tanh(layer.up(hidden)))

    weights = [*layer.up.parameters(), *layer.down.parameters()]
    return hidden + TiledMLP.apply(products, layer, layer.norm(hidden), 2, weights)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_that_runs_on_tiles_counts_with_its_last(pair, stage):
    (norm, _) = pair.run(tiled, {"stage": 0})
    for found in pair.run(tiled, {"stage": stage, "bucket_size": 400}):
        assert found == pytest.approx(norm, rel=1e-5)


def reduced_again():
    """What a gradient says that comes after its reduction."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of({"stage": 2}))
    loss = engine(make_batch(0, [mesh.rank], engine.device), losses)["loss"].sum()
    engine.backward(loss, last=True)
    reduction = engine.order
    try:
        reduction.arrive(*reduction.order[0])
    except RLHFError as error:
        return str(error)
    finally:
        backend.close_mesh(mesh)


def test_a_gradient_after_its_reduction_is_an_error(pair):
    assert pair.run(reduced_again)[0] == (
        "a gradient of shape (16, 32) arrived again after it was reduced, as with "
        "torch.utils.checkpoint and use_reentrant=True; recompute with use_reentrant=False"
    )


def room(settings):
    """Whether room was made for all gradients of this rank at once."""
    backend, seen = DeepSpeedBackend(), []
    mesh, engine, _ = start(backend, case_of(settings))
    optimizer = engine.deepspeed.optimizer
    release = optimizer._release_ipg_buffers
    optimizer._release_ipg_buffers = lambda: (
        seen.append(optimizer.grads_in_partition is not None),
        release(),
    )
    loss = engine(make_batch(0, [mesh.rank], engine.device), losses)["loss"].sum()
    engine.backward(loss, last=True)
    backend.close_mesh(mesh)
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_kept_one_by_one(pair, single, stage):
    assert pair.run(room, {"stage": stage}) == [[False]] * 2
    assert single.run(room, {"stage": stage}) == [[False]]


def came_on_two_streams():
    """What streams do where the second gradient has come on another than the first."""
    backend, accelerator = DeepSpeedBackend(), Streams()
    mesh, engine, _ = start(backend, case_of({"stage": 2}))
    reduction, optimizer = engine.order, engine.deepspeed.optimizer
    first, second = reduction.order[:2]
    for parameter, _ in (first, second):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.reduction_stream = Stream("reduction", accelerator.seen)
    optimizer.setup_buckets()
    optimizer.reduce_independent_p_g_buckets_and_remove_grads = lambda *_: accelerator.seen.append(
        f"copied on {accelerator.current.name}"
    )
    reduction.begin(last=True)

    def come():
        with accelerator.stream(Stream("other", accelerator.seen)):
            reduction.arrive(*second)
        reduction.arrive(*first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_1_and_2, "get_accelerator", lambda: accelerator)
        (found,) = seen_by(accelerator, come)
    backend.close_mesh(mesh)
    return found


def test_reduction_waits_for_a_gradient_from_another_stream(pair):
    assert pair.run(came_on_two_streams)[0] == [
        "compute waits for other",
        "copied on compute",
        "copied on compute",
        "other waits for compute",
    ]


class Model(nn.Module):
    """What a model has: parts outside of its layers, and shared weights."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_summed_in_the_order_of_a_backward_pass(tied):
    model = Model(tied=tied)
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = [parameter for parameter in names if parameter.ndim == 2]
    vectors = [parameter for parameter in names if parameter.ndim == 1]
    order = backward_order(SimpleNamespace(bit16_groups=[vectors, matrices]), model)
    assert [names[parameter] for parameter, _ in order] == [
        *([] if tied else ["head.weight"]), "layers.1.weight", "layers.0.weight", "embed.weight",
        "norm.bias", "norm.weight", "layers.1.bias", "layers.0.bias",
    ]  # fmt: skip
    assert all(parameter.ndim == 1 + group for parameter, group in order)
