"""Mixtures of experts by grouped products: layers of transformers are recognised, and the kernels,
which Triton's interpreter runs where there is no accelerator, give what their own code and autograd
give."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kernel_models import compiled_for_a_gpu
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rlhf.engine import replaced_forward
from rlhf.memory.estimate import LiveBytes
from rlhf.model.parts import decoder
from rlhf_devkit.families import FAMILIES
from rlhf_kernels.experts import Experts, activation_of, fuse_experts

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 37, 3, 5, 32, 24
KNOWN = {
    "Mixtral": 2, "Qwen3-Next": 2, "Kimi Linear": 1, "Granite 4": 2, "DeepSeek V3": 1, "GLM 5": 1,
    "Phi-3.5-MoE": 2, "Inkling": 2,
}  # fmt: skip
"""Layers of the tiny families whose experts are fused."""


def experts(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    layer = Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes | options))
    layer.config._experts_implementation = "eager"
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.to(DEVICE)


def routed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the experts that they choose, of which none is the last, and weights."""
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, device=DEVICE, requires_grad=True)
    index = torch.rand(TOKENS, EXPERTS - 1).topk(CHOICES).indices.to(DEVICE)
    weights = torch.rand(TOKENS, CHOICES, dtype=dtype, device=DEVICE, requires_grad=True)
    return hidden, index, weights


def run(layer: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The output and all gradients."""
    hidden, index, weights = routed(dtype)
    output = layer(hidden, index, weights)
    leaves = {"hidden": hidden, "weights": weights} | dict(layer.named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(output, list(leaves.values()), gradient.to(output))
    return {"output": output.detach()} | dict(zip(leaves, found, strict=True))


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        near = error * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=near, msg=name)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_outputs_and_gradients_are_those_of_the_layers_own_code(activation: str) -> None:
    layer = experts(hidden_act=activation)
    expected = run(layer)
    assert fuse_experts(nn.ModuleList([layer])) == 1
    found = run(layer)
    compare(found, expected, 1e-5)
    assert not found["gate_up_proj"][-1].any()  # No token has chosen the last expert.


@pytest.mark.parametrize("width", [8, 1096])
def test_experts_of_any_width(width: int) -> None:
    layer = experts(moe_intermediate_size=width)
    expected = run(layer)
    fuse_experts(nn.ModuleList([layer]))
    compare(run(layer), expected, 1e-5)


def test_in_bfloat16_errors_are_those_of_its_rounding() -> None:
    layer = experts()
    exact = run(layer)
    layer.to(torch.bfloat16)
    own = run(layer, torch.bfloat16)
    fuse_experts(nn.ModuleList([layer]))
    found = run(layer, torch.bfloat16)
    for name, value in exact.items():
        errors = [(each[name].float() - value).norm() / value.norm() for each in (found, own)]
        assert errors[0] < 2 * errors[1] < 0.1, name


def test_frozen_experts_pass_gradients_on() -> None:
    layer = experts().requires_grad_(requires_grad=False)
    expected = run(layer)
    fuse_experts(nn.ModuleList([layer]))
    found = run(layer)
    assert found.keys() == {"output", "hidden", "weights"}
    compare(found, expected, 1e-5)


def test_tokens_of_another_dtype_run_the_layers_own_code() -> None:
    layer = experts().to(torch.bfloat16)
    layer.config._experts_implementation = "grouped_mm"
    expected = layer(*routed())
    fuse_experts(nn.ModuleList([layer]))
    assert torch.equal(layer(*routed()), expected)


def test_an_adapter_on_experts_has_the_same_gradients() -> None:
    from peft import LoraConfig, get_peft_model

    def gradients(*, fused: bool) -> dict[str, Tensor]:
        kind, options = FAMILIES["Mixtral"]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**options)
        causal = transformers.AutoModelForCausalLM.from_config(config)
        if fused:
            assert fuse_experts(decoder(causal)) == 2
        settings = LoraConfig(
            r=2, target_modules=[], init_lora_weights=False,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )  # fmt: skip
        torch.manual_seed(1)
        adapted = get_peft_model(causal, settings).to(DEVICE)
        adapted(torch.arange(8, device=DEVICE)[None]).logits.square().sum().backward()
        named = adapted.named_parameters()
        return {name: item.grad for name, item in named if item.grad is not None}

    expected = gradients(fused=False)
    assert len(expected) == 2 * 2 * 2
    compare(gradients(fused=True), expected, 1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_compute_the_same_are_recognised(name: str) -> None:
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    tokens = torch.arange(24, device=DEVICE).view(1, 24) % 90
    before = copy.deepcopy(causal)(tokens).logits
    assert fuse_experts(decoder(causal)) == KNOWN.get(name, 0)
    torch.testing.assert_close(causal(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_a_layer_that_does_more_is_not_fused() -> None:
    class Limited(Qwen3MoeExperts):
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return super().forward(hidden, index, weights).clamp(max=7)

    class Biased(Qwen3MoeExperts):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bias = nn.Parameter(torch.zeros(4))

    config = experts().config
    layers = [Limited(config), Biased(config), Qwen3MoeExperts(config)]
    assert [activation_of(layer) for layer in layers] == ["", "", "silu"]
    assert fuse_experts(nn.ModuleList(layers)) == 1
    assert [bool(replaced_forward(layer)) for layer in layers] == [False, False, True]
    with torch.device("meta"):
        assert activation_of(Qwen3MoeExperts(config)) == "silu"
    assert activation_of(experts(hidden_act="relu")) == ""


def test_only_tokens_and_gates_are_kept_and_the_rehearsal_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Triton's interpreter keeps what its kernels were given, so tensors of their shapes stand in.
    zeros: dict[str, Any] = {
        "_product": lambda gates, *_: gates.new_zeros(len(gates), gates.shape[1] // 2),
        "_product_gradient_": lambda gates, weights, order, change, gelu: (
            torch.zeros_like(change), gates.new_zeros(len(gates), dtype=torch.float32)
        ),
        "_sum_choices": lambda rows, place: rows.new_zeros(len(place), rows.shape[1]),
    }  # fmt: skip
    own = bytes_of(experts(), DEVICE)
    rehearsed = bytes_of(experts(), torch.device("meta"), fused=True)
    for name, stand_in in zeros.items():
        monkeypatch.setattr(f"rlhf_kernels.experts.{name}", stand_in)
    real = bytes_of(experts(), DEVICE, fused=True)
    assert real == rehearsed
    # Indices have 64 bits, and the result lives too.
    gates, indices, result = TOKENS * CHOICES * 2 * INNER, TOKENS * CHOICES * 2, TOKENS * HIDDEN
    assert real[0] == 4 * (gates + 2 * indices + EXPERTS + result)
    assert real[0] < 0.5 * own[0]
    assert real[1] < own[1]


def bytes_of(layer: Any, device: torch.device, *, fused: bool = False) -> tuple[int, int]:
    """Bytes alive after forward, and most of them at one time."""
    layer.config._experts_implementation = "grouped_mm"
    if fused:
        fuse_experts(nn.ModuleList([layer]))
    layer = layer.to(device)
    hidden, index, weights = (item.detach().to(device) for item in routed())
    with LiveBytes(known=[hidden, index, weights, *layer.parameters()]) as counter:
        output = layer(hidden.requires_grad_(), index, weights.requires_grad_())
        live = counter.live
        output.sum().backward()
        return live, counter.take_peak()


def test_one_token_and_one_expert() -> None:
    layer = experts(num_experts=1)
    hidden = torch.randn(1, HIDDEN, device=DEVICE)
    index, weights = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.ones(1, 1)
    weights = weights.to(DEVICE)
    expected = layer(hidden, index, weights)
    found = Experts.apply(hidden, index, weights, layer.gate_up_proj, layer.down_proj, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert len(compiled_for_a_gpu("experts", 90, cache=tmp_path)) == 3 * 3
