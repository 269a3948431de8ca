"""What ZeRO 1 and 2 send beside computation: real DeepSpeed on two ranks, and whom streams wait
for."""

import platform
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from streams import Streams, seen_by
from torch import distributed, nn

from rlhf.testing.problem import Case, configure, follow, losses, make_batch, start
from rlhf_plugin_deepspeed import broadcasts
from rlhf_plugin_deepspeed import engine as engines
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.broadcasts import reading_order
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

A_LAYER = 600
"""Elements: fewer than a layer of the tiny model has, and more than all its norms and biases."""


def overlaps(settings):
    """Whether reductions run beside backward, whether they are ours, and whether what is sent of
    weights is."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(**settings))))
    optimizer = engine.deepspeed.optimizer
    ours = "average_tensor" in vars(optimizer)
    backend.close_mesh(mesh)
    return optimizer.overlap_comm, ours, "step" in vars(optimizer)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stage": 1}, (True, True, True)),
        ({"stage": 2}, (True, True, True)),
        ({"preset": "zero2_offload"}, (False, True, False)),
    ],
    ids=str,
)
def test_what_is_sent_beside_computation(pair, settings, expected):
    assert pair.run(overlaps, settings) == [expected] * 2


def sent_by_us(apart):
    """Whether weights are broadcast where each rank is said to be on a host of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(platform, "node", lambda: f"host{distributed.get_rank()}")
        return overlaps({"stage": 1})[2]


@pytest.mark.parametrize("apart", [False, True])
def test_over_several_hosts_deepspeed_gathers_weights(pair, apart):
    assert pair.run(sent_by_us, apart) == [not apart] * 2


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
    """The outcome and this rank's final weights, sent in buckets of `least` elements, and what was
    broadcast."""
    calls = []
    broadcast = distributed.broadcast

    def counted(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return broadcast(tensor, *arguments, **options)

    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "MIN_ELEMENTS", least)
        patch.setattr(broadcasts, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(broadcasts.distributed, "broadcast", counted)
        outcome, engine, mesh = follow(backend, case)
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    backend.close_mesh(mesh)
    return outcome, weights, calls


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_weights_that_are_broadcast_are_those_that_were_updated(pair, settings, tied, states):
    config = configure(DeepSpeedConfig(**settings), dtype=states, states=states)
    case = Case(config=config, tied=tied, steps=3)
    (whole, weights, none), _ = pair.run(train, case, 10**9)
    assert none == []
    for least in (A_LAYER, 50):
        for outcome, found, calls in pair.run(train, case, least):
            assert outcome == whole
            assert calls
            assert all(torch.equal(value, weights[name]) for name, value in found.items())


def covered():
    """Elements of each bucket, and whether each weight is in one of them, sent by its owner."""
    backend = DeepSpeedBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "MIN_ELEMENTS", A_LAYER)
        mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(stage=1))))
    optimizer = engine.deepspeed.optimizer
    flat = max(optimizer.bit16_groups_flat, key=torch.numel)
    flat.zero_()
    for bucket in engine._weights.buckets:
        for weights, owner, _ in bucket.shards:
            each = flat.numel() // mesh.world
            begin = (weights.data_ptr() - flat.data_ptr()) // flat.element_size()
            assert begin // each == (begin + weights.numel() - 1) // each == owner
            weights.add_(1)
    sizes = [
        sum(weights.numel() for weights, *_ in bucket.shards) for bucket in engine._weights.buckets
    ]
    parameters = [item for group in optimizer.bit16_groups for item in group if item.ndim == 2]
    once = all(bool((item == 1).all()) for item in parameters)
    backend.close_mesh(mesh)
    return sizes, once


def test_every_weight_is_sent_once_by_its_owner(pair):
    # The embedding, which is the head too, two layers, and nothing that the head alone has.
    assert pair.run(covered) == [([512, 1024, 1024, 0], True)] * 2


@contextmanager
def streams():
    """What streams do and wait for in here, in order."""
    accelerator = Streams()

    def tell(name, function):
        def call(*arguments, **options):
            accelerator.seen.append(f"{name} on {accelerator.current.name}")
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "MIN_ELEMENTS", A_LAYER)
        patch.setattr(broadcasts, "get_accelerator", lambda: accelerator)
        patch.setattr(broadcasts, "deepspeed_gather", tell("gather", broadcasts.deepspeed_gather))
        patch.setattr(broadcasts, "distributed", SimpleNamespace(**vars(distributed)))
        patch.setattr(broadcasts.distributed, "broadcast", tell("send", distributed.broadcast))
        yield accelerator


def waits():
    """In a step, the forward pass after it, and when weights are asked for."""
    backend = DeepSpeedBackend()
    with streams() as accelerator:
        mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(stage=2))))
        engine.backward(
            engine(make_batch(0, [0, 1], engine.device), losses)["loss"].sum(), last=True
        )
        found = seen_by(
            accelerator,
            engine.step,
            lambda: engine(make_batch(1, [0, 1], engine.device), losses),
            lambda: engine.module,
            engine.eval,
        )
    backend.close_mesh(mesh)
    return found


def test_a_layer_waits_for_its_own_weights_and_a_reader_outside_for_all(pair):
    step, forward, asked, mode = pair.run(waits)[0]
    first, *others = (["send on weights"] * count for count in (1, 2, 1, 0))
    assert step == [
        "compute waits for weights",
        "weights waits for compute",
        # Norms and biases, which layers read too.
        "gather on weights",
        *first,
        "bucket 0 sent on weights",
        *(
            line
            for number, sent in enumerate(others, 1)
            for line in (*sent, f"bucket {number} sent on weights")
        ),
    ]
    # The embedding, the first layer, and with the last one what the head reads.
    assert forward == [f"compute waits for bucket {number}" for number in (0, 1, 3)]
    assert asked == ["compute waits for weights"]
    assert mode == []


def waits_without_layers():
    """In a forward pass of a model whose layers share a weight."""
    backend = DeepSpeedBackend()
    with streams() as accelerator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "decoder_layers", lambda model: [])
        mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(stage=1))))
        found = seen_by(accelerator, lambda: engine(make_batch(1, [0, 1], engine.device), losses))
    backend.close_mesh(mesh)
    return found[0], len(engine._weights.buckets)


def test_without_layers_forward_waits_for_all(pair):
    assert pair.run(waits_without_layers)[0] == (["compute waits for bucket 1"], 2)


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


def saved(folder, settings):
    """Elements of what a checkpoint has of this rank's weights, and of what is stored for them."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(**settings), dtype="bf16", states="bf16")
    mesh, engine, _ = start(backend, Case(config=config))
    groups = engine.deepspeed.optimizer.state_dict()["single_partition_of_fp32_groups"]
    backend.close_mesh(mesh)
    return [(item.numel(), item.untyped_storage().nbytes() // 2) for item in groups]


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}], ids=str)
def test_a_checkpoint_has_each_weight_of_a_rank_once(pair, settings, tmp_path):
    for groups in pair.run(saved, tmp_path, settings):
        assert all(elements == stored for elements, stored in groups)
        assert sum(elements for elements, _ in groups) < 2000


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
