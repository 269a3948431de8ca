"""Gradients of ZeRO 1 to 3, at 1 and 2 reduced beside backward: real DeepSpeed on two ranks, and
whom streams wait for."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from streams import Stream, Streams, seen_by
from torch import distributed

from rlhf.errors import RLHFError
from rlhf.testing.problem import ROWS, Case, configure, follow, losses, make_batch, start
from rlhf.testing.ranks import RankFailure
from rlhf_plugin_deepspeed import gradients
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.capabilities import installed_version, older
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

A_WEIGHT = 512
"""Elements of each of the tiny model's, all larger than a bucket of 400."""


def case_of(settings, dtype="fp32", **more):
    return Case(config=configure(DeepSpeedConfig(**settings), dtype=dtype), **more)


def without_head(hidden, head, batch):
    """A loss that leaves the head without a gradient."""
    return {"loss": hidden.square().mean(dim=(1, 2)) * batch["weight"]}


def norms_of(settings, readouts_by_rank):
    """The gradient's norms in a step whose micro-batches have these losses and in the one after it;
    all losses before and after have gradients for the head."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of(settings, tied=False))
    readouts = readouts_by_rank[mesh.rank]
    everywhere = (losses,) * len(readouts)
    _, *found = [step(mesh, engine, each) for each in (everywhere, readouts, everywhere)]
    backend.close_mesh(mesh)
    return found


def step(mesh, engine, readouts):
    """The norm in a step whose micro-batches have these losses."""
    for number, readout in enumerate(readouts, start=1):
        rows = [(4 * (number - 1) + mesh.rank + more) % ROWS for more in (0, 2)]
        loss = engine(make_batch(0, rows, engine.device), readout)["loss"].sum() / ROWS
        engine.backward(loss, last=number == len(readouts))
    return engine.step().read().grad_norm


HEADS = {
    "in the first micro-batch": [(losses, without_head)] * 2,
    "in the last micro-batch": [(without_head, losses)] * 2,
    "on one rank": [(losses,), (without_head,)],
    "on the other, later": [(without_head, losses), (losses, without_head)],
    "nowhere": [(without_head,)] * 2,
}


ON_ANY_RANK = [
    {"stage": stage, "offload_optimizer": offload} for stage in (1, 2) for offload in (False, True)
]
ALIKE = ["in the first micro-batch", "in the last micro-batch", "nowhere"]
SHARDED = [{"stage": 3}, {"stage": 3, "persistence_threshold": 0}, {"preset": "zero3_offload"}]


@pytest.mark.parametrize("heads", HEADS)
def test_a_gradient_counts_whoever_has_it(pair, heads):
    expected, _ = pair.run(norms_of, {"stage": 0}, HEADS[heads])
    for settings in [*ON_ANY_RANK, *(SHARDED if heads in ALIKE else [])]:
        for found in pair.run(norms_of, settings, HEADS[heads]):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("heads", ALIKE)
def test_a_gradient_counts_in_whichever_micro_batch_it_comes(single, heads):
    (expected,) = single.run(norms_of, {"stage": 0}, HEADS[heads])
    for settings in (*ON_ANY_RANK, *SHARDED):
        (found,) = single.run(norms_of, settings, HEADS[heads])
        assert found == pytest.approx(expected, rel=1e-5)


def test_shards_with_padding_count_too(three):
    heads = [(without_head, losses)] * 3
    expected, *_ = three.run(norms_of, {"stage": 0}, heads)
    for found in three.run(norms_of, {"preset": "zero3_offload"}, heads):
        assert found == pytest.approx(expected, rel=1e-5)


@contextmanager
def told(calls):
    """Appends elements and receiver of what is reduced in here; None for all ranks."""
    reduce, all_reduce = distributed.reduce, distributed.all_reduce

    def to_one(tensor, rank, **options):
        calls.append((tensor.numel(), rank))
        return reduce(tensor, rank, **options)

    def to_all(tensor, **options):
        calls.append((tensor.numel(), None))
        return all_reduce(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(gradients.distributed, "reduce", to_one)
        patch.setattr(gradients.distributed, "all_reduce", to_all)
        yield


def train(settings, local="2", more=None):
    """The outcome of a short training, so many ranks being on this host, and what was reduced."""
    backend, calls = DeepSpeedBackend(), []
    with pytest.MonkeyPatch.context() as patch, told(calls):
        patch.setenv("LOCAL_WORLD_SIZE", local)
        outcome, _, mesh = follow(backend, case_of(settings, **(more or {})))
    backend.close_mesh(mesh)
    return outcome, calls


@pytest.mark.parametrize("stage", [1, 2])
def test_the_curve_is_the_same_in_buckets_of_any_size_over_any_hosts(pair, stage):
    (whole, _), _ = pair.run(train, {"stage": stage, "bucket_size": 10**6})
    for size in (400, A_WEIGHT, 1100):
        for local in ("2", "1"):
            for outcome, calls in pair.run(train, {"stage": stage, "bucket_size": size}, local):
                assert outcome == whole
                assert all((rank is None) == (local == "1") for _, rank in calls)


def reduced(settings):
    """What is reduced in the last two micro-batches of a step."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, case_of(settings))
    found = []
    for last in (False, True):
        calls = []
        with told(calls):
            loss = engine(make_batch(0, [mesh.rank], engine.device), losses)["loss"].sum()
            engine.backward(loss, last=last)
        found.append(calls)
    backend.close_mesh(mesh)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_each_part_is_summed_once_where_its_weights_are_updated(pair, stage):
    half = A_WEIGHT // 2
    weights = [
        *((A_WEIGHT, 1), (A_WEIGHT, 1)),  # The last layer.
        *((half, 0), (half, 1), (A_WEIGHT, 0)),  # One of the first is on both ranks.
        (A_WEIGHT, 0),  # The embedding, which is the head.
    ]
    norms_and_biases = [(80, 1), (80, 0)]
    every = [*weights, *norms_and_biases]
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
    reduce = distributed.reduce

    def tell(tensor, rank, **options):
        accelerator.seen.append(f"{tensor.numel()} on {accelerator.current.name}")
        return reduce(tensor, rank, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "get_accelerator", lambda: accelerator)
        patch.setattr(gradients, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(gradients.distributed, "reduce", tell)
        patch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: accelerator.seen.append(f"{tensor.numel()} for {stream.name}"),
        )
        (found,) = seen_by(accelerator, lambda: engine.backward(loss, last=True))
    backend.close_mesh(mesh)
    return found, optimizer.overlap_comm


def test_compute_waits_for_reductions_and_what_they_read_is_kept(pair):
    waits = ["reduction waits for compute", "compute waits for reduction"]
    kept = f"{A_WEIGHT} for reduction"
    found, overlaps = pair.run(reduced_beside, False)[0]
    assert overlaps
    assert found == [
        *(*waits, kept, "512 on reduction") * 2,
        *(*waits, kept, "256 on reduction", "256 on reduction"),
        *(*waits, kept, "512 on reduction") * 2,
        # What is in a bucket stays until the step.
        *(*waits, "80 on reduction", "80 on reduction"),
        "compute waits for reduction",
    ]


def test_with_the_optimizer_on_the_host_reductions_are_in_line(pair):
    found, overlaps = pair.run(reduced_beside, True)[0]
    assert not overlaps
    sizes = (512, 512, 256, 256, 512, 512, 80, 80)
    assert found == [f"{size} on compute" for size in sizes]


APART = {"zero_optimization": {"contiguous_gradients": False}}


class Changed(DeepSpeedBackend):
    """A backend under settings of DeepSpeed that somebody has changed."""

    def __init__(self, changes):
        self.changes = changes

    def configure_zero(self, *given):
        plan = super().configure_zero(*given)
        settings = dict(plan.settings)
        for name, changes in self.changes.items():
            settings[name] = settings.get(name, {}) | changes
        return evolve(plan, settings=settings)


def step_under(changes, settings, dtype="fp32"):
    """Norms of a step whose head has a gradient in the first micro-batch and of the one after it,
    and whether reductions are ours."""
    backend = Changed(changes)
    case = case_of(settings, dtype=dtype, tied=False)
    mesh, engine, _ = start(backend, case)
    norms = [step(mesh, engine, HEADS["in the first micro-batch"][mesh.rank]) for _ in range(2)]
    ours = engine._reduction is not None
    backend.close_mesh(mesh)
    return norms, ours


@pytest.mark.parametrize(
    ("changes", "settings", "dtype"),
    [
        ({"zero_optimization": {"overlap_comm": False}}, {"stage": 1}, "fp32"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"stage": 2}, "bf16"),
        (APART, {"stage": 1}, "fp32"),
        (APART, {"stage": 2}, "fp32"),
    ],
    ids=str,
)
def test_what_lies_otherwise_is_left_to_deepspeed(pair, changes, settings, dtype):
    if changes is APART and older(installed_version(), "0.19.8"):
        with pytest.raises(RankFailure, match="adds up gradients wrongly"):
            pair.run(step_under, changes, settings, dtype)
        return
    (expected, ours), _ = pair.run(step_under, {}, {"stage": 1}, dtype)
    assert ours
    for found, ours in pair.run(step_under, changes, settings, dtype):
        assert not ours
        assert found == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 1e-2)


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
    reduction = engine._reduction
    try:
        reduction._take(*reduction._order[0])
    except RLHFError as error:
        return str(error)
    finally:
        backend.close_mesh(mesh)


def test_a_gradient_that_comes_after_its_reduction_is_not_lost_in_silence(pair):
    assert pair.run(reduced_again)[0] == (
        "a gradient of shape (16, 32) came again after it was reduced, as where "
        "torch.utils.checkpoint runs a layer twice with use_reentrant=True: recompute with "
        "use_reentrant=False."
    )


def made(settings):
    """Zeros made where the head, which is first in the order, has no gradient."""
    backend, counted = DeepSpeedBackend(), []
    mesh, engine, _ = start(backend, case_of(settings, tied=False))
    loss = engine(make_batch(0, [mesh.rank], engine.device), without_head)["loss"].sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "torch", SimpleNamespace(**vars(torch)))
        patch.setattr(
            gradients.torch,
            "zeros_like",
            lambda tensor: (counted.append(tuple(tensor.shape)), torch.zeros_like(tensor))[1],
        )
        engine.backward(loss, last=True)
    backend.close_mesh(mesh)
    return counted


def test_zeros_are_made_for_what_never_came_alone(pair):
    assert pair.run(made, {"stage": 2, "bucket_size": 400}) == [[(32, 16)]] * 2


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
    reduction, optimizer = engine._reduction, engine.deepspeed.optimizer
    first, second = reduction._order[:2]
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
            reduction._take(*second)
        reduction._take(*first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "get_accelerator", lambda: accelerator)
        (found,) = seen_by(accelerator, come)
    backend.close_mesh(mesh)
    return found


def test_a_gradient_that_came_on_another_stream_is_waited_for(pair):
    assert pair.run(came_on_two_streams)[0] == [
        "compute waits for other",
        "copied on compute",
        "copied on compute",
        "other waits for compute",
    ]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"stage": 1, "bucket_size": 400}, {}),
        ({"stage": 2, "bucket_size": 1100}, {"micro_batches": 2}),
        ({"stage": 2, "bucket_size": 40}, {"adapter": True, "micro_batches": 2}),
        ({"preset": "zero1_offload", "bucket_size": 400}, {"micro_batches": 2}),
        ({"preset": "zero2_offload", "bucket_size": 400}, {"adapter": True, "micro_batches": 2}),
    ],
    ids=str,
)
def test_over_one_rank_and_three_the_curve_is_the_same(three, single, settings, more):
    ((whole, _),) = single.run(train, {"stage": 0}, "1", more)
    for outcome, _ in (
        *three.run(train, settings, "3", more),
        *single.run(train, settings, "1", more),
    ):
        assert outcome.norms == pytest.approx(whole.norms, rel=1e-4)
        assert outcome.losses == pytest.approx(whole.losses, rel=1e-4)
