"""Gated layers that compute their product again: the same gradients, and less that is kept."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

from rlhf.errors import RLHFError
from rlhf.memory.estimate import LiveBytes
from rlhf.model.parts import decoder
from rlhf_devkit.families import FAMILIES, SIZES
from rlhf_kernels.fused import check_fusible, check_gates_known, not_fusible
from rlhf_kernels.gates import (
    ACTIVATIONS,
    activation_of,
    factors,
    gates_of,
    output_of,
    parts_of,
    recompute_products,
)

KNOWN = {name: {"gelu"} for name in ("Gemma 2", "Gemma 3", "Gemma 4", "RecurrentGemma")} | {
    "Zamba2": {""}
}
"""What the gated layers of a family compute, if it is not `silu`."""
KINDS = ("LlamaConfig", "Gemma3TextConfig", "Phi3Config")


def model(kind: str) -> Any:
    options = next((o for k, o in FAMILIES.values() if k == kind), SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**options), attn_implementation="eager"
    )


def run(causal: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and what was alive when backward began."""
    causal.zero_grad()
    tokens = torch.arange(40).view(1, 40) % 90
    with LiveBytes(known=list(causal.parameters())) as counter:
        hidden = decoder(causal)(input_ids=tokens, use_cache=False)[0]
        loss = (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum()
        live = counter.live
    loss.backward()
    named = causal.named_parameters()
    return {name: item.grad for name, item in named if item.grad is not None}, live


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_and_less_is_kept(kind: str) -> None:
    causal = model(kind)
    expected, whole = run(causal)
    expected = {name: value.clone() for name, value in expected.items()}
    layers = gates_of(decoder(causal))
    assert len(layers) == 2
    recompute_products(decoder(causal), {})
    found, less = run(causal)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        near = 1e-5 * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=near, msg=name)
    width = causal.config.intermediate_size
    # Of each layer the product and the activation of its gate, in float32.
    assert whole - less >= 2 * 2 * 40 * width * 4


def test_the_result_is_the_same_without_a_gradient() -> None:
    causal = model("LlamaConfig")
    with torch.no_grad():
        expected = causal(torch.arange(8)[None]).logits
        recompute_products(decoder(causal), {})
        assert torch.equal(causal(torch.arange(8)[None]).logits, expected)


def test_a_layer_with_an_unknown_activation_keeps_its_product() -> None:
    layer = torch.nn.Module()
    layer.gate_up_proj, layer.down_proj = torch.nn.Linear(4, 12), torch.nn.Linear(6, 4)
    recompute_products(torch.nn.ModuleList([layer]), {id(layer): torch.mul})
    hidden = torch.randn(3, 4, requires_grad=True)
    gate, up = layer.gate_up_proj(hidden).chunk(2, dim=-1)
    output, expected = layer.forward(hidden), layer.down_proj(gate * up)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output.sum(), hidden)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), hidden))


def test_a_frozen_layer_under_an_adapter_has_its_gradient() -> None:
    from peft import LoraConfig, get_peft_model

    def gradient(*, forget: bool) -> torch.Tensor:
        causal = model("LlamaConfig")
        if forget:
            recompute_products(decoder(causal), {})
        torch.manual_seed(1)
        settings = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
        adapted = get_peft_model(causal, settings)
        adapted(torch.arange(8)[None]).logits.square().sum().backward()
        return next(p.grad for n, p in adapted.named_parameters() if "lora_A" in n)

    torch.testing.assert_close(gradient(forget=True), gradient(forget=False))


def test_unsupported_gates_and_devices_are_refused() -> None:
    config = transformers.GPT2Config()
    with pytest.raises(RLHFError, match=r"^model\.recompute selective does not support "):
        check_gates_known(config, "selective")
    check_gates_known(config, "full")
    with pytest.raises(RLHFError) as caught:
        check_fusible(transformers.LlamaConfig(), "liger", torch.device("cpu"))
    assert str(caught.value) == (
        "model.kernels liger needs a CUDA device with Triton, but this run is on cpu; set "
        "model.kernels to auto"
    )
    check_fusible(transformers.LlamaConfig(), "auto", torch.device("cpu"))


def test_layers_that_liger_would_get_wrong_are_not_fused() -> None:
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    other = transformers.LlamaConfig(hidden_act="gelu")
    assert not_fusible(other, cuda) == "has no gates with the activation gelu"
    exact = transformers.Gemma2Config(hidden_activation="gelu")
    assert "the activation gelu" in not_fusible(exact, cuda)
    assert not_fusible(transformers.GPT2Config(), cuda).startswith(
        "does not support the family gpt2 (supported: gemma, "
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_are_fused_compute_the_product_of_their_activation(name: str) -> None:
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    layers = gates_of(decoder(causal))
    found = {activation_of(layer) for layer in layers}
    assert found == KNOWN.get(name, {"silu"} if layers else set())
    for layer in layers:
        hidden = torch.randn(3, getattr(layer, parts_of(layer)[1]).out_features)
        gate, up = factors(layer, hidden)
        for activation in found - {""}:
            expected = output_of(layer, ACTIVATIONS[activation](gate) * up)
            torch.testing.assert_close(layer(hidden), expected)


@pytest.mark.parametrize("name", ["LFM2", "Granite 4", "Granite 4, dense"])
def test_gated_layers_are_found_under_other_names(name: str) -> None:
    kind, options = FAMILIES[name]
    config = getattr(transformers, kind)(**options)
    causal = transformers.AutoModelForCausalLM.from_config(config)
    assert len(gates_of(decoder(causal))) == config.num_hidden_layers


def test_a_layer_that_does_more_than_the_product_is_not_fused() -> None:
    class Scaled(LlamaMLP):
        factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Limited(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=7))

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes)
    assert activation_of(LlamaMLP(config)) == "silu"
    assert not activation_of(Scaled(config))
    assert not activation_of(Limited(config))
    Scaled.factor = 1.0
    assert activation_of(Scaled(config)) == "silu"
    other = transformers.LlamaConfig(**sizes, hidden_act="relu")
    assert not activation_of(LlamaMLP(other))
    with torch.device("meta"):
        assert activation_of(LlamaMLP(config)) == "silu"


def test_a_layer_with_dropout_is_not_fused_whatever_its_mode() -> None:
    class Dropping(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.dropout = torch.nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return self.down_proj(product)

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    residual = SeedOssMLP(transformers.SeedOssConfig(**sizes, residual_dropout=0.1))
    dropping = Dropping(transformers.LlamaConfig(**sizes))
    before = torch.get_rng_state()
    for mode in (True, False):
        for layer in (residual, dropping):
            assert not activation_of(layer.train(mode))
            assert {part.training for part in layer.modules()} == {mode}
    assert torch.equal(torch.get_rng_state(), before)
    residual.residual_dropout, dropping.dropout.p = 0.0, 0.0
    assert activation_of(residual) == activation_of(dropping) == "silu"
