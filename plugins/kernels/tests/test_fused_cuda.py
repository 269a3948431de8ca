"""Fused kernels on a CUDA device against torch's operators: layers, log-probabilities,
divergences."""

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from rlhf.config.sections import ModelConfig
from rlhf.forwards import replaced_forward
from rlhf.model.head import Head
from rlhf.model.packed import PackedModel
from rlhf.model.parts import decoder
from rlhf.readouts import logits as chunks
from rlhf.readouts import token_logprobs
from rlhf.readouts.chunked import add_product
from rlhf.reference.live import adapter_off
from rlhf_devkit.families import FAMILIES, MAMBA, SIZES, gradients, tree_batch
from rlhf_distill import WholeTeacher
from rlhf_distill.distillation import compare, compiled_compare
from rlhf_distill.distributions import forward_kl
from rlhf_kernels.fused import FAMILIES as FUSED
from rlhf_kernels.fused import fuse
from rlhf_kernels.kernels import TritonKernels
from rlhf_kernels.layers import compile_layers
from rlhf_kernels.lora import fuse_adapters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1], "mamba_d_head": 32}),
    "Gemma": ("GemmaConfig", SIZES | {"head_dim": 16}),
    # Its inner width is twice the hidden one, as its configuration demands.
    "Granite 4, dense": (
        "GraniteMoeHybridConfig",
        FAMILIES["Granite 4, dense"][1] | {"mamba_d_head": 32},
    ),
    "OLMo 2": ("Olmo2Config", SIZES),
    "Qwen3 MoE": ("Qwen3MoeConfig", SIZES | {"head_dim": 16, "moe_intermediate_size": 32}),
    "Qwen3-VL": ("Qwen3VLTextConfig", SIZES | {"head_dim": 16}),
    "SmolLM 3": ("SmolLM3Config", SIZES),
}
KNOWN = {
    getattr(transformers, config).model_type: (config, options)
    for config, options in (FAMILIES | MORE).values()
}

HYBRIDS = ("qwen3_5_text", "kimi_linear", "bamba")
"""Families with each kind of gated norm; Qwen3.5 rotates a part of each head."""
ROTATED = ("gpt_oss", "cohere2", "phi", "mixtral", "granitemoehybrid")
"""Families whose rotary embedding is our kernel."""


def run(model_type: str, how: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config_class, options = KNOWN[model_type]
    sizes = {"hidden_size": 64} | ({"head_dim": 16} if "head_dim" in options else {})
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(options | sizes))
    causal = built(config)
    for parameter in causal.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    causal = causal.to(CUDA)
    if how == "compiled":
        compile_layers(decoder(causal), None)
    elif how == "fused":
        assert fuse(decoder(causal), "auto", CUDA)
    found = PackedModel(causal)(tree_batch().to(CUDA), token_logprobs)["logprobs"]
    (found * torch.linspace(-1, 2, len(found), device=CUDA)).sum().backward()
    return found.detach(), gradients(causal)


def built(config: Any) -> Any:
    if config.model_type != "qwen3_vl_text":
        return transformers.AutoModelForCausalLM.from_config(config)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": config.hidden_size, "deepstack_visual_indexes": []}
    whole = transformers.Qwen3VLConfig(text_config=config.to_dict(), vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(whole)


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_layers_equal_the_models_layers(model_type: str) -> None:
    same_by(model_type, "fused")


@pytest.mark.parametrize("model_type", [*HYBRIDS, *ROTATED])
def test_layers_with_fused_gated_norms_equal_the_models_layers(model_type: str) -> None:
    same_by(model_type, "fused")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt_oss", *HYBRIDS])
def test_compiled_layers_equal_the_models_layers(model_type: str) -> None:
    same_by(model_type, "compiled")


def same_by(model_type: str, how: str) -> None:
    logprobs, expected = run(model_type, "own")
    found, actual = run(model_type, how)
    torch.testing.assert_close(found, logprobs, rtol=1e-3, atol=1e-3)
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(
            actual[parameter] / scale, gradient / scale, rtol=0, atol=2e-3, msg=parameter
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_in_fp8_are_near_the_models_products(recipe: str) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128}
    causal = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    module = PackedModel(causal.to(CUDA, torch.bfloat16))
    batch = tree_batch().to(CUDA)
    expected = module.hidden(batch)
    expected.sum().backward()
    before = gradients(causal)
    causal.zero_grad()
    compile_layers(decoder(causal), recipe)
    found = module.hidden(batch)
    found.sum().backward()
    assert near(found, expected) < 0.3
    for name, gradient in gradients(causal).items():
        assert near(gradient, before[name]) < 0.6, name


def adapted(kernels: str, **options: Any) -> PackedModel:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128}
    causal = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes))
    settings = LoraConfig(target_modules="all-linear", init_lora_weights=False, **options)
    model = get_peft_model(causal, settings).to(CUDA, torch.bfloat16)
    fuse_adapters(model, ModelConfig(kernels=kernels), CUDA)
    return PackedModel(model.train())


@pytest.mark.parametrize("rank", [5, 16])
def test_adapters_that_are_added_in_place_equal_those_of_peft(rank: int) -> None:
    expected = outputs_and_gradients(adapted("none", r=rank))
    module = adapted("auto", r=rank)
    layers = [part for part in module.modules() if hasattr(part, "lora_A")]
    assert len(layers) == 14
    assert all(replaced_forward(layer) for layer in layers)
    for name, found in outputs_and_gradients(module).items():
        assert near(found, expected[name]) < 0.1, name


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_compiled_layers_train_only_the_adapters(recipe: str | None) -> None:
    if recipe:
        pytest.importorskip("torchao")
    module = adapted("auto", r=16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    expected = outputs_and_gradients(module)
    compile_layers(decoder(module.causal), recipe)
    found = outputs_and_gradients(module)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert near(value, expected[name]) < (0.6 if recipe else 0.1), name
    assert before.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def outputs_and_gradients(module: PackedModel) -> dict[str, torch.Tensor]:
    batch = tree_batch().to(CUDA)
    hidden = module.hidden(batch)
    (hidden * torch.linspace(-1, 2, hidden.shape[-1], device=CUDA)).sum().backward()
    with torch.no_grad(), adapter_off(module.model):
        base = module.hidden(batch)
    found = gradients(module.causal)
    assert all("lora_" in name for name in found)
    return {"hidden": hidden.detach(), "base": base, **found}


def near(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 4.0)])
def test_logits_are_read_as_on_the_host(
    dtype: torch.dtype, scale: float, softcap: float | None
) -> None:
    torch.manual_seed(0)
    logits = (6 * torch.randn(33, 9001)).to(dtype)
    targets, gradient = torch.randint(0, 9001, (33,)), torch.randn(33)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    expected = chunks.read(logits.clone(), targets, **options)
    found = chunks.read(logits.to(CUDA), targets.to(CUDA), **options)
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
    normaliser = expected[0]
    wanted = chunks.logit_gradient(logits.clone(), targets, normaliser, gradient, **options)
    moved = [item.to(CUDA) for item in (logits, targets, normaliser, gradient)]
    for_logits = chunks.logit_gradient(*moved, **options)
    loose = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(for_logits.cpu(), wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_are_summed_without_rounding_each(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(8, 96, 256, device=CUDA), torch.randn(8, 256, 48, device=CUDA)
    left, right = left.to(dtype), right.to(dtype)
    total = torch.zeros(96, 48, device=CUDA)
    for one, other in zip(left, right, strict=True):
        # As in production, the first factor is a transposed one.
        add_product(total, one.T.contiguous().T, other)
    expected = (left.double() @ right.double()).sum(0)
    assert (total - expected).norm() < 1e-5 * expected.norm()


def test_a_fused_divergence_is_the_divergence() -> None:
    torch.manual_seed(0)
    for num in (64, 37, 64, 50):
        raw = (3 * torch.randn(num, 501)).to(CUDA, torch.bfloat16)
        head = Head(weight=torch.randn(501, 8, device=CUDA, dtype=torch.bfloat16))
        hidden = torch.randn(num, 8, device=CUDA, dtype=torch.bfloat16)
        teacher = WholeTeacher(hidden, head)
        options: dict[str, Any] = {
            "against": teacher.against, "measure": measure, "temperature": 2.0, "nll": 0.1,
            "scale": 1.0, "softcap": None, "with_gradient": True,
        }  # fmt: skip
        targets = torch.randint(0, 501, (num,), device=CUDA)
        tensors = (targets, torch.randn(num, device=CUDA), *teacher.chunk(slice(0, num)))
        expected = compare(raw.clone(), *tensors, **options)
        found = compiled_compare(TritonKernels().for_any_rows, raw.clone(), *tensors, **options)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-4)


def measure(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return forward_kl(student, teacher), -teacher.exp()
