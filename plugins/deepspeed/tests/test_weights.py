"""Sharded creation and loading, inference engines, experts as leaves, generation, the group's
life."""

import itertools
import os
import warnings

import attrs
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import nn

from rlhf.errors import RLHFError
from rlhf_devkit.forked import Forked
from rlhf_devkit.problem import (
    Case,
    Packed,
    configure,
    initial_weights,
    losses,
    shape,
    start,
    whole_weights,
)
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.leaves import expert_blocks
from rlhf_plugin_deepspeed.mesh import ALLOCATOR, expand_segments
from rlhf_plugin_deepspeed.quiet import silenced

SHARDED = {"stage": 3, "persistence_threshold": 0}


def sharded(change, dtype="fp32"):
    """A module of stage 3 filled with changed initial weights: what was missing, or the error; its
    weights."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(**SHARDED), dtype=dtype)
    mesh = backend.setup_mesh(config)
    plan = backend.configure_zero(config, mesh, shape(), "policy", True, 0)
    with backend.model_context(plan, "policy", mesh):
        module = Packed()
    weights = initial_weights()
    weights["model.scale"] = torch.full((1,), 3.0)
    for name, value in change.items():
        weights.pop(name)
        if value is not None:
            weights[name] = value
    try:
        found = backend.load_weights(module, weights if mesh.rank == 0 else None, plan, mesh)
    except RLHFError as error:
        return str(error), {}, 0
    elements = sum(parameter.ds_tensor.numel() for parameter in module.parameters())
    engine = backend.prepare(module, None, None, "reference", plan, mesh)
    values = whole_weights(DeepSpeedBackend(), engine)
    backend.close_mesh(mesh)
    return found, values, elements


def test_sharded_weights_are_those_of_the_plain_module(pair):
    (missing, values, elements), (_, _, other) = pair.run(sharded, {})
    assert missing == ()
    expected = initial_weights() | {"model.scale": torch.full((1,), 3.0)}
    del expected["model.head.weight"]  # It is the embedding's.
    assert set(values) == set(expected)
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    whole = sum(parameter.numel() for parameter in Packed().parameters())
    assert elements == other
    assert elements <= whole // 2 + 16


def test_sharded_weights_take_the_precision_of_the_plan(pair):
    _, values, _ = pair.run(sharded, {}, "bf16")[0]
    assert values["model.embed.weight"].dtype == torch.bfloat16


def test_missing_weights_are_returned_on_every_rank(pair):
    change = {"model.layers.0.up.bias": None, "model.head.weight": None}
    for missing, *_ in pair.run(sharded, change):
        # The head is tied: the embedding's weight fills it.
        assert missing == ("model.layers.0.up.bias",)


def test_a_weight_of_another_shape_is_an_error_on_every_rank(pair):
    for text, *_ in pair.run(sharded, {"model.layers.1.up.weight": torch.zeros(3, 5)}):
        assert text == (
            "the weight model.layers.1.up.weight has the shape [3, 5] but the model expects [32, "
            "16]; the weights in model.path do not belong to its config.json"
        )


def policy_and_reference(settings):
    """Losses of a policy before and after a step and of a frozen engine beside it, and its mode."""
    backend = DeepSpeedBackend()
    case = Case(config=configure(DeepSpeedConfig(**settings)))
    mesh, policy, _ = start(backend, case)
    plan = backend.configure_zero(case.config, mesh, shape(), "reference", False, 0)
    with backend.model_context(plan, "reference", mesh):
        module = Packed()
    weights = initial_weights()
    if plan.stage == 3:
        backend.load_weights(module, weights if mesh.rank == 0 else None, plan, mesh)
    else:
        module.load_state_dict(weights)
    reference = backend.prepare(module, None, None, "reference", plan, mesh)
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(2)}
    seen = []
    for _ in range(2):
        with torch.no_grad():
            frozen = float(reference(batch, losses)["loss"].sum())
        loss = policy(batch, losses)["loss"].sum()
        policy.backward(loss, last=True)
        policy.step()
        seen.append((float(loss), frozen))
    facts = (reference.stage, reference.precision, reference.role, reference.module.training)
    backend.close_mesh(mesh)
    return seen, facts


@pytest.mark.parametrize(
    "settings", [{"stage": 2}, SHARDED, SHARDED | {"frozen": 3}, {"stage": 1, "frozen": 3}], ids=str
)
def test_a_reference_does_not_move_beside_a_policy(pair, settings):
    for seen, facts in pair.run(policy_and_reference, settings):
        (first, frozen), (second, frozen_later) = seen
        assert first == pytest.approx(frozen, rel=1e-6)
        assert frozen_later == frozen
        assert second < first
        assert facts == (settings.get("frozen", 0), "fp32", "reference", False)


class Expert(nn.Linear):
    """An expert."""

    def __init__(self) -> None:
        super().__init__(4, 4)


class Block(nn.Module):
    """A block of experts with its router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))


class Stacked(nn.Module):
    """Experts in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(2, 4, 8))


class HybridLayer(nn.Module):
    """A decoder layer that holds its experts itself, beside a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(2))


def test_blocks_of_experts_are_recognised_by_structure():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Stacked(), HybridLayer(), nn.Linear(4, 4)])
    assert expert_blocks(model) == ["layers.0", "layers.1"]


def generation(settings, memory=None):
    """The modes inside the context and after it; the elements of weights before it, inside it,
    after a forward inside it, and after it; whether a forward after it gives the same."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(**settings))))
    if memory is not None:
        engine.mesh = attrs.evolve(engine.mesh, memory=memory)
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(2)}

    def elements():
        return sum(parameter.numel() for parameter in engine.module.parameters())

    engine.train()
    sizes = [elements()]
    with backend.generation_context(engine):
        inside = engine.module.training
        sizes.append(elements())
        first = float(engine.module(batch, losses)["loss"].sum())
        sizes.append(elements())
    modes = inside, engine.module.training
    sizes.append(elements())
    with torch.no_grad():
        same = float(engine(batch, losses)["loss"].sum()) == first
    backend.close_mesh(mesh)
    return modes, sizes, same


def test_generation_runs_in_evaluation_mode_and_restores_the_mode(pair):
    for modes, _, same in pair.run(generation, SHARDED):
        assert modes == (False, True)
        assert same


def test_generation_keeps_whole_weights_where_there_is_room(pair):
    whole = sum(parameter.numel() for parameter in Packed().parameters())
    assert [sizes for _, sizes, _ in pair.run(generation, SHARDED)] == [[0, whole, whole, 0]] * 2
    # Norms and biases are whole anyway with a threshold.
    found = pair.run(generation, SHARDED | {"persistence_threshold": 100})
    assert [sizes[1:3] for _, sizes, _ in found] == [[whole, whole]] * 2
    assert all(same for *_, same in found)
    found = pair.run(generation, SHARDED, 1)
    assert [sizes for _, sizes, _ in found] == [[0, 0, 0, 0]] * 2


def refused_precision(settings):
    # Some CPUs have it.
    get_accelerator().is_fp16_supported = lambda: False
    try:
        DeepSpeedBackend().setup_mesh(configure(DeepSpeedConfig(**settings), dtype="fp16"))
    except RLHFError as error:
        return str(error)
    finally:
        del get_accelerator().is_fp16_supported
    return ""


def test_fp16_is_refused_without_an_accelerator_that_supports_it(single):
    problem = "is fp16, which the accelerator here (cpu) does not support"
    assert single.run(refused_precision, {}) == [
        f"model.dtype {problem}; set model.dtype to bf16 or fp32"
    ]
    assert single.run(refused_precision, {"preset": "zero2-fp16"}) == [
        f"the precision of the preset zero2-fp16 {problem}; use the preset zero2, and set "
        "model.dtype to bf16 or fp32"
    ]


def test_torchs_warnings_about_deepspeed_are_not_shown():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
        with silenced():
            warnings.warn(words, FutureWarning, stacklevel=1)
            barrier = "barrier(): using the device under current context."
            warnings.warn(barrier, stacklevel=1)
            warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
        warnings.warn(words, FutureWarning, stacklevel=1)
    assert [str(item.message) for item in caught] == ["something else is deprecated", words]


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {}, ["expandable_segments:True"]),
        ("cpu", {}, []),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, []),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, []),
    ],
)
def test_the_allocator_uses_expandable_segments_by_default(monkeypatch, device, given, expected):
    settings = []
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    expand_segments(device)
    assert settings == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_on_a_device_grow(monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    expand_segments("cuda")
    block = torch.empty(2**28, device="cuda")
    segments = torch.cuda.memory_snapshot()
    holds = [s for s in segments if 0 <= block.data_ptr() - s["address"] < s["total_size"]]
    assert [segment["is_expandable"] for segment in holds] == [True]
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
ALONE = """
import torch
from attrs import evolve
from rlhf.config.sections import TrainConfig
from rlhf_devkit.problem import Case, configure, follow
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

case = Case(config=configure(DeepSpeedConfig(stage=2)), steps=1)
for _ in range(2):
    backend = DeepSpeedBackend()
    outcome, engine, mesh = follow(backend, case)
    assert mesh.world == 1
    backend.close_mesh(mesh)
    assert not torch.distributed.is_initialized()
print(outcome.moved)

run = configure(DeepSpeedConfig(timeout=45))
run = evolve(run, train=TrainConfig(seed=7, deterministic=True))
mesh = DeepSpeedBackend().setup_mesh(run)
group = torch.distributed.group.WORLD._get_backend(mesh.device)
drawn = float(torch.rand(()))
torch.manual_seed(7)
print(group.options._timeout, torch.are_deterministic_algorithms_enabled(),
      drawn == float(torch.rand(())))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a program prints in a process of its own, without a launcher's variables."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    program = tmp_path_factory.mktemp("alone") / "program.py"
    program.write_text(ALONE)
    process = Forked(str(program), environment=environment)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.splitlines()


def test_without_a_launcher_one_process_runs_twice(alone):
    assert alone[0] == "[True]"


def test_the_timeout_determinism_and_the_seed_are_as_configured(alone):
    assert alone[1:] == ["0:45:00 True True"]


def sharded_over_a_group():
    backend, config = DeepSpeedBackend(), configure(DeepSpeedConfig(**SHARDED))
    mesh = backend.setup_mesh(config)
    group = groups._clone_world_group()
    plan = backend.configure_zero(config, mesh, shape(), "policy", True, 0)
    shards = attrs.evolve(mesh.shards, group=group)
    with backend.model_context(plan, "policy", attrs.evolve(mesh, shards=shards)):
        module = Packed()
    backend.close_mesh(mesh)
    return all(item.ds_process_group is group for item in module.parameters())


def test_weights_are_sharded_over_the_axis_of_shards(pair):
    assert pair.run(sharded_over_a_group) == [True, True]


def axes_of_two_sizes():
    """Two runs in one process with axes of DeepSpeed's; returns the sizes of its data axis."""
    sizes = []
    for size in (1, 2):
        backend = DeepSpeedBackend()
        mesh = backend.setup_mesh(configure(DeepSpeedConfig()))
        groups._init_tp_mesh_device(tensor_model_parallel_size=size)
        parallel_state_sp.initialize_sequence_parallel(2)
        sizes.append(groups.get_data_parallel_world_size())
        backend.close_mesh(mesh)
    assert parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None
    return sizes


def test_a_process_can_have_axes_of_several_sizes(pair):
    assert pair.run(axes_of_two_sizes) == [[2, 1]] * 2


def test_incomplete_variables_of_a_launcher_are_refused(monkeypatch):
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RLHFError) as error:
        DeepSpeedBackend().setup_mesh(configure(DeepSpeedConfig()))
    assert str(error.value) == (
        "the launcher set RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start the "
        "ranks with torchrun, or unset them to run one process"
    )


def statuses():
    """How many elements are whole after each bucket of weights is taken, and after the last."""
    backend = DeepSpeedBackend()
    mesh, engine, _ = start(backend, Case(config=configure(DeepSpeedConfig(**SHARDED))))
    parameters = dict(engine.module.named_parameters())
    found = []
    buckets = [[name] for name in parameters]
    for bucket in itertools.chain(backend.weights(engine, buckets), [{}]):
        whole = {name for name, item in parameters.items() if item.numel()}
        found.append((whole, {*bucket}))
    backend.close_mesh(mesh)
    return found


def test_only_one_bucket_is_whole_at_a_time(pair):
    for found in pair.run(statuses):
        assert len(found) > 2
        assert all(whole == bucket for whole, bucket in found)
