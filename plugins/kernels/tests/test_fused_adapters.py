"""Adapters whose update is added in place, against peft's own forward."""

from typing import Any

import pytest
import torch
from kernel_models import Shards
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn

from rlhf import sharding
from rlhf.config.sections import ModelConfig
from rlhf.devices import rehearsing_on
from rlhf.forwards import replace_forward, replaced_forward
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder
from rlhf.model.trainable import recompute
from rlhf.reference.live import adapter_off
from rlhf_devkit.families import gradients, llama, row
from rlhf_kernels.gates import recompute_products
from rlhf_kernels.lora import forward, fuse_adapters, is_plain


def adapter(*, bias: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(12, 20, bias=bias)}).double()
    settings = LoraConfig(target_modules=["base"], **({"init_lora_weights": False} | options))
    return inject_adapter_in_model(settings, model)["base"].double()


def fused(layer: Any) -> Any:
    replace_forward(layer, forward.__get__(layer))
    return layer


def results(layer: Any, hidden: Tensor) -> list[Tensor]:
    output = layer(hidden)
    factors = [item for item in layer.parameters() if item.requires_grad]
    wanted = [hidden, *factors] if hidden.requires_grad else factors
    return [output, *torch.autograd.grad(output.square().sum(), wanted)]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"r": 5, "bias": True}, {"lora_alpha": 3}, {"use_rslora": True}]
)
def test_outputs_and_gradients_are_those_of_peft(options: dict[str, Any], trained: bool) -> None:
    layer = adapter(**options)
    assert is_plain(layer)
    hidden = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=trained)
    for tensors in (hidden, hidden[0], hidden[0, :0]):
        own = tensors.detach().requires_grad_(trained)
        expected = results(adapter(**options), own)
        torch.testing.assert_close(results(fused(layer), own), expected)
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden), adapter(**options)(hidden))


def test_an_adapter_that_is_off_or_starts_at_zero_gives_the_base_to_the_last_bit() -> None:
    layer, hidden = fused(adapter(init_lora_weights=True)), torch.randn(3, 12, dtype=torch.float64)
    assert torch.equal(layer(hidden), layer.base_layer(hidden))
    layer = fused(adapter())
    layer.enable_adapters(False)
    assert torch.equal(layer(hidden), layer.base_layer(hidden))
    layer.enable_adapters(True)
    assert not torch.equal(layer(hidden), layer.base_layer(hidden))


@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True, "bias": True}]
)
def test_other_adapters_run_the_forward_of_peft(options: dict[str, Any]) -> None:
    assert not is_plain(adapter(**options))


def test_two_adapters_and_trained_sharded_or_mixed_weights_run_the_forward_of_peft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, trained, mixed, sharded = (adapter() for _ in range(4))
    two.update_layer("other", 8, lora_alpha=16, config=LoraConfig(r=8))
    trained.base_layer.requires_grad_(True)
    mixed.lora_A.float()
    monkeypatch.setattr(sharding, "_shardings", [Shards([sharded.base_layer.weight])])
    assert not any(is_plain(layer) for layer in (two, trained, mixed, sharded))


def test_only_layers_with_fused_kernels_have_them() -> None:
    pytest.importorskip("triton")

    def is_fused(*, kind: str, **settings: Any) -> bool:
        layer = adapter()
        with rehearsing_on(kind):
            fuse_adapters(layer, ModelConfig(**settings), torch.device("meta"))
        return replaced_forward(layer) is not None

    assert is_fused(kind="cuda")
    assert is_fused(kind="cuda", fp8="tensorwise")
    assert not is_fused(kind="cpu")
    assert not is_fused(kind="cuda", kernels="none")
    assert not is_fused(kind="cuda", quantize="nf4")


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_the_gradients_of_a_model_are_those_of_peft(how: str) -> None:
    def found(*, fuse: bool) -> dict[str, Tensor]:
        causal = llama(attention_bias=True).causal.double()
        if how == "selective":
            recompute_products(decoder(causal), {})
        settings = LoraConfig(
            target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        torch.manual_seed(0)
        module = PackedModel(get_peft_model(causal, settings).double()).train()
        if how == "full":
            recompute(causal)
        layers = [fused(layer) for layer in module.modules() if fuse and is_plain(layer)]
        assert len(layers) == 21 * fuse
        batch = row(90, 38)
        hidden = module.packed_row(batch)
        (hidden * torch.linspace(-1, 2, hidden.shape[-1])).sum().backward()
        with torch.no_grad(), adapter_off(module.model):
            assert module.packed_row(batch).isfinite().all()
        return gradients(causal)

    torch.testing.assert_close(found(fuse=True), found(fuse=False))
