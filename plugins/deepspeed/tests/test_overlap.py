"""What ZeRO 1 and 2 send beside computation: real DeepSpeed on two ranks, and whom streams wait
for."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import distributed, nn

from rlhf.testing.problem import Case, configure, follow, losses, start
from rlhf.testing.problem import _batch as batch_of
from rlhf_plugin_deepspeed import engine as engines
from rlhf_plugin_deepspeed import overlap
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.overlap import reading_order, reduce_beside_backward

A_LAYER = 600
"""Elements, fewer than a layer of the tiny model has and more than all its norms and biases."""


def test_after_backward_streams_wait_for_the_last_reduction_and_the_host_does_not(monkeypatch):
    seen = []
    compute = SimpleNamespace(wait_stream=lambda other: seen.append(f"wait for the {other}"))
    accelerator = SimpleNamespace(current_stream=lambda: compute)
    monkeypatch.setattr(overlap, "get_accelerator", lambda: accelerator)

    class Optimizer:
        """With what DeepSpeed does at the end of a backward."""

        overlap_comm = True
        reduction_stream = "reduction"
        extra_large_param_to_reduce: ClassVar[dict] = {}

        def average_tensor(self, tensor, dtype):
            seen.append(f"average {tensor.name} in {dtype}")

        def reduce_ipg_grads(self):
            seen.append("reduce")

        def independent_gradient_partition_epilogue(self):
            self.reduce_ipg_grads()
            seen.append("the host waits" if self.overlap_comm else "keep shards")

    optimizer = Optimizer()
    reduce_beside_backward(optimizer)
    for _ in range(2):
        seen.clear()
        optimizer.independent_gradient_partition_epilogue()
        assert seen == ["reduce", "wait for the reduction", "keep shards"]
        assert optimizer.overlap_comm

    def keep(stream):
        seen.append(f"keep for the {stream}")

    for name, large in (("a bucket", {}), ("a gradient", {"fp32": "its weight"})):
        seen.clear()
        optimizer.extra_large_param_to_reduce = large
        optimizer.average_tensor(SimpleNamespace(name=name, record_stream=keep), "fp32")
        # A bucket is there until the step; a gradient that is larger than one goes by itself.
        assert seen == [*(["keep for the reduction"] if large else []), f"average {name} in fp32"]


def overlaps(settings):
    """Whether reductions run beside backward, whether its end is ours, and the gathering."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(**settings))))
    optimizer = engine.deepspeed.optimizer
    ours = "independent_gradient_partition_epilogue" in vars(optimizer)
    backend.close_mesh(mesh)
    return optimizer.overlap_comm, ours, "step" in vars(optimizer)


@pytest.mark.parametrize(
    "settings", [{"stage": 1}, {"stage": 2}, {"preset": "zero2_offload"}], ids=str
)
def test_what_is_sent_overlaps_where_gradients_stay_on_the_device(pair, settings):
    on = "stage" in settings
    assert pair.run(overlaps, settings) == [(on, on, on)] * 2


def hosts(count):
    """Whether updated weights are handed out by us on so many hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(2 // count))
        return overlaps({"stage": 1})[2]


def test_over_several_hosts_deepspeed_gathers_weights(pair):
    assert pair.run(hosts, 1) == [True] * 2
    assert pair.run(hosts, 2) == [False] * 2


class Model(nn.Module):
    """What a model has: parts that are read outside of its layers, and shared weights."""

    def __init__(self, *, tied):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @property
    def causal(self):
        return SimpleNamespace(get_output_embeddings=lambda: self.head)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_their_place_in_a_forward_pass(tied):
    model = Model(tied=tied)
    order = reading_order(model, list(model.layers))
    assert [order[layer.weight] for layer in model.layers] == [1, 2, 3]
    assert [order[layer.bias] for layer in model.layers] == [1, 2, 3]
    # The norm may be read at any time; a tied weight when its first reader comes.
    assert order[model.embed.weight] == order[model.norm.weight] == 0
    assert order[model.head.weight] == (0 if tied else 4)


def train(case, least):
    """The outcome and this rank's final weights, handed out in portions of `least` elements, and
    what was broadcast."""
    calls = []
    broadcast = distributed.broadcast

    def counted(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return broadcast(tensor, *arguments, **options)

    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LEAST", least)
        patch.setattr(overlap, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(overlap.distributed, "broadcast", counted)
        outcome, engine, mesh = follow(backend, case)
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    backend.close_mesh(mesh)
    return outcome, weights, calls


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_weights_that_are_handed_out_in_portions_are_those_that_were_updated(
    pair, settings, tied, states
):
    dtype = {"fp32": "fp32", "bf16": "bf16"}[states]
    config = configure(DeepSpeedConfig(**settings), dtype=dtype, states=states)
    case = Case(config=config, tied=tied, steps=3)
    (whole, weights, none), _ = pair.run(train, case, 10**9)
    assert none == []
    for least in (A_LAYER, 50):
        for outcome, found, calls in pair.run(train, case, least):
            assert outcome == whole
            assert calls
            assert all(torch.equal(value, weights[name]) for name, value in found.items())


def covered():
    """What the portions hold of each flat group, and their sizes."""
    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LEAST", A_LAYER)
        mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(stage=1))))
    optimizer = engine.deepspeed.optimizer
    flat = max(optimizer.bit16_groups_flat, key=torch.numel)
    flat.zero_()
    for portion in engine._renewal.portions:
        for weights, owner, _ in portion.shares:
            each = flat.numel() // mesh.world
            begin = (weights.data_ptr() - flat.data_ptr()) // flat.element_size()
            assert begin // each == (begin + weights.numel() - 1) // each == owner
            weights.add_(1)
    sizes = [sum(share[0].numel() for share in item.shares) for item in engine._renewal.portions]
    parameters = [item for group in optimizer.bit16_groups for item in group if item.ndim == 2]
    once = all(bool((item == 1).all()) for item in parameters)
    backend.close_mesh(mesh)
    return sizes, once


def test_every_weight_is_handed_out_once_by_its_owner(pair):
    # The embedding, which is the head too, two layers, and nothing that the head alone has.
    assert pair.run(covered) == [([512, 1024, 1024, 0], True)] * 2


class Stream:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wait_stream(self, other):
        self.seen.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.seen.append(f"{self.name} waits for portion {event.number}")


class Streams:
    """An accelerator whose streams tell whom they wait for."""

    def __init__(self):
        self.seen = []
        self.current = Stream("compute", self.seen)
        self.events = 0

    def is_synchronized_device(self):
        return False

    def current_stream(self):
        return self.current

    def Stream(self):  # noqa: N802
        return Stream("weights", self.seen)

    def Event(self):  # noqa: N802
        number, self.events = self.events, self.events + 1
        return SimpleNamespace(number=number, record=partial(self.record, number))

    def record(self, number):
        self.seen.append(f"portion {number} on {self.current.name}")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


def waits():
    """Whom streams wait for in a step, the forward pass after it, and when weights are asked
    for."""
    accelerator = Streams()
    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LEAST", A_LAYER)
        patch.setattr(overlap, "get_accelerator", lambda: accelerator)
        mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(stage=2))))
        engine.backward(engine(batch_of(0, [0, 1], engine.device), losses)["loss"].sum(), last=True)
        found = []
        for act in (
            engine.step,
            lambda: engine(batch_of(1, [0, 1], engine.device), losses),
            lambda: engine.module,
            engine.eval,
        ):
            accelerator.seen.clear()
            act()
            found.append(list(accelerator.seen))
    backend.close_mesh(mesh)
    return found


def test_a_layer_waits_for_its_own_weights_and_a_reader_outside_for_all(pair):
    step, forward, asked, mode = pair.run(waits)[0]
    assert step == [
        "compute waits for weights",
        "weights waits for compute",
        *(f"portion {number} on weights" for number in range(4)),
    ]
    # The embedding, the first layer, and with the last one what the head reads.
    assert forward == [f"compute waits for portion {number}" for number in (0, 1, 3)]
    assert asked == ["compute waits for weights"]
    assert mode == []


def copies(states):
    """Whether the optimizer holds a copy of this rank's weights, and what DeepSpeed knows of it."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(stage=2), dtype="bf16", states=states)
    mesh, engine, _ = start(backend, Case(config=config))
    optimizer = engine.deepspeed.optimizer
    own = optimizer.single_partition_of_fp32_groups
    parts = [parts[mesh.rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    stores = {item.untyped_storage().data_ptr() for item in parts}
    fragments = {
        item._hp_mapping.hp_fragment.untyped_storage().data_ptr()
        for group in optimizer.bit16_groups
        for item in group
        if item._hp_mapping is not None
    }
    backend.close_mesh(mesh)
    inside = {item.untyped_storage().data_ptr() for item in own} <= stores
    return not inside, not fragments <= stores


@pytest.mark.parametrize(("states", "copied"), [("fp32", True), ("bf16", False)])
def test_states_in_bf16_are_over_the_weights_themselves(pair, states, copied):
    assert pair.run(copies, states) == [(copied, copied)] * 2


def train_with_copies(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "without_masters", lambda optimizer: None)
        return train(case, 10**9)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
def test_a_curve_without_copies_is_that_with_them(pair, settings):
    config = configure(DeepSpeedConfig(**settings), dtype="bf16", states="bf16")
    case = Case(config=config)
    before, after = (
        pair.run(function, case, *more)[0]
        for function, more in ((train_with_copies, ()), (train, (10**9,)))
    )
    assert before[0] == after[0]
    assert all(torch.equal(value, before[1][name]) for name, value in after[1].items())
