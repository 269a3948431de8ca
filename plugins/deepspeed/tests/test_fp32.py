"""Weights that stay in fp32 in a model in bf16: trained, under an adapter, and in a frozen model.
`tests/promises/test_fp32.py` has runs."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_devkit.problem import Case, configure, initial_weights, load
from rlhf_plugin_deepspeed import prepare
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig

NAME = "layers.0.up.weight"
STAGES = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3},
    {"stage": 3, "persistence_threshold": 0},
]  # fmt: skip


def held(settings, how):
    """The whole weight that an engine holds, its master, and the dtypes of all weights."""
    backend = DeepSpeedBackend()
    case = Case(config=configure(DeepSpeedConfig(**settings), dtype="bf16"))
    mesh = backend.setup_mesh(case.config)
    plan, module = load(backend, case, mesh, "policy", trained=how != "frozen")
    weight = module.model.get_parameter(NAME)
    weight.data = weight.data.float()
    values = {name.removeprefix("model."): value for name, value in initial_weights().items()}
    if plan.sharded:
        backend.load_weights(module.model, values if mesh.rank == 0 else None, plan, mesh)
    else:
        weight.data.copy_(values[NAME])
    if how == "adapter":
        module.model = get_peft_model(
            module.model, LoraConfig(r=2, target_modules=["down"]), autocast_adapter_dtype=False
        )
    optimizer = None
    if how != "frozen":
        trained = [item for item in module.parameters() if item.requires_grad]
        groups = [[it for it in trained if it.dtype == d] for d in (torch.bfloat16, torch.float32)]
        groups = [{"params": group, "weight_decay": 0.0} for group in groups if group]
        optimizer = backend.build_optimizer(groups, case.config, plan, module)
    engine = backend.prepare(module, optimizer, None, "policy", plan, mesh)
    dtypes = {name: item.dtype for name, item in module.named_parameters()}
    (name,) = (name for name, item in module.named_parameters() if item is weight)
    (bucket,) = backend.weights(engine, [[name]])
    whole = bucket[name].clone()
    parts = backend.save_checkpoint(engine).fragments
    saved = [part.values.clone() for part in parts if part.name == name and part.kind == "weight"]
    # Otherwise one rank may end its groups before the other has joined them.
    mesh.barrier()
    backend.close_mesh(mesh)
    return whole, saved, [name for name, dtype in dtypes.items() if dtype != torch.bfloat16]


@pytest.mark.parametrize("settings", STAGES, ids=str)
@pytest.mark.parametrize("how", ["trained", "adapter", "frozen"])
def test_a_weight_in_fp32_stays_there(pair, how, settings):
    expected = initial_weights()[f"model.{NAME}"]
    assert not torch.equal(expected, expected.bfloat16().float())
    if how == "frozen":
        settings = {"frozen": 3 if settings["stage"] == 3 else 0}
    for whole, saved, in_fp32 in pair.run(held, settings, how):
        assert whole.dtype == torch.float32
        assert torch.equal(whole, expected)
        assert len(in_fp32) == 1
        assert {part.dtype for part in saved} <= {torch.float32}
        # An adapter's checkpoint has no base.
        assert bool(saved) == (how != "adapter")


def buffer_after_a_cast():
    """The dtype of a buffer in fp32 after DeepSpeed's engine, which casts it as before 0.19.3."""
    backend = DeepSpeedBackend()
    case = Case(config=configure(DeepSpeedConfig(stage=1), dtype="bf16"))
    mesh = backend.setup_mesh(case.config)
    plan, module = load(backend, case, mesh, "policy", trained=True)
    value = torch.tensor([1 + 2**-12])
    module.model.register_buffer("bias", value.clone())
    initialize = prepare.deepspeed.initialize

    def casting(model, **options):
        model.model.bias = model.model.bias.bfloat16()
        return initialize(model=model, **options)

    prepare.deepspeed.initialize = casting
    try:
        groups = [{"params": list(module.parameters()), "weight_decay": 0.0}]
        optimizer = backend.build_optimizer(groups, case.config, plan, module)
        backend.prepare(module, optimizer, None, "policy", plan, mesh)
    finally:
        prepare.deepspeed.initialize = initialize
    backend.close_mesh(mesh)
    return torch.equal(module.model.bias, value)


def test_a_buffer_that_deepspeed_casts_gets_its_values_back(pair):
    assert pair.run(buffer_after_a_cast) == [True, True]
