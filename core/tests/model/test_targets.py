"""What `lora.targets: all-linear` adapts in each family, and what peft refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from small_models import config_of, empty, load, write_model
from transformers import AutoModelForCausalLM

from rlhf.config.sections import LoraConfig
from rlhf.errors import RLHFError
from rlhf.model.adapters import merged
from rlhf.model.packed import PackedModel
from rlhf.model.save import check_exportable, verify_export
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import EXPERTS, FAMILIES, SIZES, tree_batch

STACKED = ("experts.gate_up_proj", "experts.down_proj")
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SCANS = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
MORE = {
    "Nemotron-H": (
        "NemotronHConfig",
        SIZES
        | SCANS
        | {"layers_block_type": ["mamba", "attention"], "chunk_size": 16}
        | {"n_routed_experts": 4, "moe_intermediate_size": 16},
    ),
    "Falcon-H1": (
        "FalconH1Config",
        SIZES
        | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
        | {"mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "Falcon": ("FalconConfig", SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "Laguna": ("LagunaConfig", SIZES | EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "Qwen3-MoE": ("Qwen3MoeConfig", SIZES | MIXTURE | {"head_dim": 8}),
    "Qwen3.5-MoE": (
        "Qwen3_5MoeTextConfig",
        FAMILIES["Qwen3.5"][1] | MIXTURE | {"shared_expert_intermediate_size": 16},
    ),
    "GLM 4.5": (
        "Glm4MoeConfig",
        SIZES
        | {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "Granite MoE": ("GraniteMoeConfig", SIZES | EXPERTS),
}
MIXTURES = (
    "Qwen3-MoE", "Qwen3.5-MoE", "GPT-OSS", "DeepSeek V3", "GLM 4.5", "Mixtral", "Granite MoE",
    "Granite 4",
)  # fmt: skip


def config_named(name: str, **more: Any) -> Any:
    kind, options = (FAMILIES | MORE)[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return getattr(transformers, kind)(**options | more)


def with_lora(tmp_path: Path, config: Any, **options: Any) -> Any:
    return config_of(write_model(tmp_path, config), lora=LoraConfig(rank=2, **options))


def adapted_names(module: Any) -> set[str]:
    return {
        name.split(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in module.model.named_parameters()
        if ".lora_A" in name
    }


@pytest.mark.parametrize("name", ["Llama 4", "Phi-3.5-MoE", "Nemotron-H", "Falcon-H1", "Granite 4"])
def test_default_targets_train_and_are_exportable(tmp_path: Path, name: str) -> None:
    config = with_lora(tmp_path, config_named(name))
    check_exportable(empty(config).model)
    module = load(config)
    names = adapted_names(module)
    assert not [each for each in names if "router" in each or "gate." in each]
    assert not [each for each in names if "mamba" in each and each.endswith("out_proj")]
    assert [each for each in names if each.endswith("q_proj")]
    module.path = "separate"
    module(tree_batch(), token_logprobs)["logprobs"].sum().backward()
    gradients = {n: p.grad for n, p in module.model.named_parameters() if ".lora_B" in n}
    assert {name for name, gradient in gradients.items() if not gradient.any()} == set()


def test_linear_layers_of_a_familys_own_kind_are_adapted(tmp_path: Path) -> None:
    names = adapted_names(load(with_lora(tmp_path, config_named("Falcon"))))
    assert {name.split(".")[-1] for name in names} == {
        "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h",
    }  # fmt: skip


def test_default_targets_leave_out_what_text_does_not_reach(tmp_path: Path) -> None:
    text = {k: v for k, v in FAMILIES["Gemma 3"][1].items() if k != "vocab_size"}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text | {"vocab_size": 300}, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=299, boi_token_index=297, eoi_token_index=298,
    )  # fmt: skip
    module = load(with_lora(tmp_path, config))
    names = adapted_names(module)
    assert names
    assert all("language_model" in name for name in names)
    assert "vision_tower" in module.model.active_peft_config.exclude_modules


def test_what_peft_refuses_is_told_as_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        load(with_lora(tmp_path, config_named("Nemotron-H"), targets=("out_proj",)))
    assert str(caught.value).startswith(
        "peft refuses the adapter of NemotronHForCausalLM ([PEFT:PeftType.LORA] Module 'out_proj' "
        "is incompatible with Mamba-based models"
    )
    assert str(caught.value).endswith("; change lora")


def test_an_adapter_that_peft_would_not_read_again_is_refused_before_training(
    tmp_path: Path,
) -> None:
    config = with_lora(tmp_path, config_named("Laguna"))
    with pytest.raises(RLHFError) as caught:
        check_exportable(empty(config).model)
    assert str(caught.value).startswith(
        "the adapter of LagunaForCausalLM could not be opened again, because peft does not read "
        "base_model.model.model.layers.1.mlp.shared_experts."
    )
    assert str(caught.value).endswith("; leave these out of lora.targets")


@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_experts_are_reopened_by_peft_and_merged(tmp_path: Path, name: str) -> None:
    config = with_lora(tmp_path / "base", config_named(name), parameters=STACKED)
    check_exportable(empty(config).model)
    module = load(config)
    adapters = {n: p for n, p in module.model.named_parameters() if ".lora_" in n}
    assert [n for n in adapters if ".experts." in n]
    logprobs(module).sum().backward()
    assert [n for n, p in adapters.items() if ".lora_B" in n and not p.grad.any()] == []
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter += 0.3 * torch.randn_like(parameter)
        trained = logprobs(module)
        module.save_weights(module.state_dict(), tmp_path / "adapter")
        verify_export(tmp_path / "adapter", module.model)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        untrained = logprobs(PackedModel(base))
        again = PackedModel(PeftModel.from_pretrained(base, tmp_path / "adapter"))
        torch.testing.assert_close(logprobs(again), trained)
        whole = PackedModel(merged(module.model))
        whole.save_weights(whole.state_dict(), tmp_path / "merged")
        plain = PackedModel(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
        torch.testing.assert_close(logprobs(plain), trained, atol=3e-5, rtol=1e-5)
    assert (trained - untrained).abs().max() > 1


def logprobs(module: PackedModel) -> torch.Tensor:
    module.path = "separate"
    return module(tree_batch(), token_logprobs)["logprobs"]


@pytest.mark.parametrize("name", ["DeepSeek V3", "GLM 4.5", "Qwen3-Next"])
def test_default_targets_leave_out_names_that_peft_takes_for_experts(
    tmp_path: Path, name: str
) -> None:
    module = load(with_lora(tmp_path, config_named(name), dropout=0.1))
    names = adapted_names(module)
    assert [each for each in names if each.endswith("o_proj")]
    assert not [each for each in names if "experts" in each]
    assert (
        not {"gate_proj", "up_proj", "down_proj"} & module.model.active_peft_config.target_modules
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "DeepSeek V3",
            {"targets": ("o_proj", "up_proj", "gate_proj")},
            "peft adapts experts or routers of DeepseekV3ForCausalLM in place of the modules "
            "gate_proj and up_proj in lora.targets; remove these, and name the weights of experts "
            "in lora.parameters",
        ),
        (
            "Qwen3.5-MoE",
            {"parameters": ("conv1d.weight",)},
            "lora.parameters conv1d.weight names no stacked weight of Qwen3_5MoeForCausalLM; "
            "available: experts.down_proj, experts.gate_up_proj",
        ),
    ],
)
def test_names_of_what_would_not_be_adapted_as_such_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RLHFError) as caught:
        load(with_lora(tmp_path, config_named(name), **options))
    assert str(caught.value) == message
