"""Exported folders open in plain transformers and peft with the same weights, or the run says why
not."""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Shards
from families import chatml_tokenizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from small_models import SIZES
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
)

from rlhf import sharding
from rlhf.commands.merge import merge_command
from rlhf.config.sections import Config, LoraConfig, ModelConfig
from rlhf.engine import Mesh, Plan, register_sharding
from rlhf.errors import RLHFError
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel
from rlhf.model.role import ModelSpec
from rlhf.model.save import save_tokenizer_and_config, verify_export
from rlhf.model.tokenizer import CHATML

FAMILIES = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES),
    "experts": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "merged experts": GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
}


def module_of(family: str, **options: Any) -> PackedModel:
    torch.manual_seed(0)
    return PackedModel(AutoModelForCausalLM.from_config(FAMILIES[family], **options).eval())


def logits(causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_exported_model_opens_in_transformers_with_the_same_logits(
    family: str, wrapped: bool, tmp_path: Path
) -> None:
    module = module_of(family)
    state = module.state_dict() if wrapped else module.causal.state_dict()
    module.save_weights({name: value.clone() for name, value in state.items()}, tmp_path)
    verify_export(tmp_path, module.model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    module.path = "separate"
    torch.testing.assert_close(logits(again), logits(module.causal))
    assert again.config._attn_implementation != "rlhf_tree"
    assert "rlhf" not in (tmp_path / "config.json").read_text()


def test_a_large_model_is_written_in_several_files_that_open_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partialmethod(PreTrainedModel.save_pretrained, max_shard_size="8KB")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", small)
    module = module_of("untied")
    module.save_weights(module.state_dict(), tmp_path)
    verify_export(tmp_path, module.model)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    module.path = "separate"
    torch.testing.assert_close(logits(again), logits(module.causal))
    files[-1].unlink()
    with pytest.raises(RLHFError, match=r"incomplete: lm_head\.weight is missing"):
        verify_export(tmp_path, module.model)


def test_full_precision_weights_are_written_in_the_models_dtype(tmp_path: Path) -> None:
    module = module_of("untied", dtype=torch.bfloat16)
    state = {name: value.float() for name, value in module.state_dict().items()}
    module.save_weights(state, tmp_path)
    verify_export(tmp_path, module.model)
    written = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards_are_verified_by_the_shapes_they_were_created_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_shardings", [])
    module = module_of("tied")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    register_sharding(Shards(module.parameters()))
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    module.save_weights(state, tmp_path)
    verify_export(tmp_path, module.model)


def test_a_damaged_export_is_reported(tmp_path: Path) -> None:
    module = module_of("untied")
    module.save_weights(module.state_dict(), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    rest = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    save_file(rest, file)
    with pytest.raises(RLHFError) as caught:
        verify_export(tmp_path, module.model)
    assert str(caught.value) == (
        f"the export in {tmp_path} is incomplete: lm_head.weight is missing (expected shape "
        "[40, 32])"
    )
    save_file(rest | {"lm_head.weight": torch.zeros(40, 31)}, file)
    with pytest.raises(
        RLHFError, match=r"lm_head.weight has shape \[40, 31\], expected \[40, 32\]"
    ):
        verify_export(tmp_path, module.model)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RLHFError, match=f"^cannot read the exported file {file}: "):
        verify_export(tmp_path, module.model)


def adapted(base: Path, revision: str | None = None) -> PackedModel:
    """A trained adapter over the model in `base`."""
    config = Config(model=ModelConfig(path=str(base), revision=revision), lora=LoraConfig(rank=4))
    plan = Plan(precision="fp32")
    module = load_model(ModelSpec(config=config), plan=plan, mesh=Mesh(), hooks=None)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return module


def test_an_adapter_is_merged_into_the_revision_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    module_of("tied").causal.save_pretrained(base)
    module = adapted(base, revision="old")
    module.save_weights(module.state_dict(), adapter)
    asked = []
    load = AutoModelForCausalLM.from_pretrained

    def remember(path: str, **options: Any) -> Any:
        asked.append(options["revision"])
        return load(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", remember)
    merge_command(str(adapter), str(tmp_path / "merged"))
    assert asked == ["old"]


@pytest.mark.parametrize("whole", [True, False])
def test_only_the_adapter_is_exported_and_it_merges_into_its_base(
    whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    module_of("tied").causal.save_pretrained(base)
    module = adapted(base)
    state = module.state_dict()
    if not whole:
        state = {name: value for name, value in state.items() if "lora_" in name}
    module.save_weights(state, adapter)
    verify_export(adapter, module.model)
    save_tokenizer_and_config(module.model, chatml_tokenizer(), adapter)
    module.path = "separate"
    expected = logits(module.causal)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(logits(again), expected)
    assert merge_command(str(adapter), str(merged)) == 0
    assert f"merged {adapter} into {base} and wrote {merged}" in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(merged).chat_template == CHATML
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [2, 1]


def test_merging_reports_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        merge_command(str(tmp_path), str(tmp_path / "out"))
    assert str(caught.value) == (
        f"{tmp_path} is not an adapter folder: it has no adapter_config.json"
    )
    with pytest.raises(RLHFError) as caught:
        merge_command(str(tmp_path / "nope"), str(tmp_path / "out"))
    assert str(caught.value) == (
        f"{tmp_path}/nope does not exist; pass an adapter folder or a run folder"
    )
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "gone")})
    )
    with pytest.raises(RLHFError) as caught:
        merge_command(str(tmp_path), str(tmp_path / "out"))
    assert str(caught.value) == (
        f"cannot load the base model {tmp_path}/gone of {tmp_path} (Repo id must be in the form "
        f"'repo_name' or 'namespace/repo_name': '{tmp_path}/gone'. Use `repo_type` argument if "
        "needed); correct base_model_name_or_path in its adapter_config.json"
    )
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RLHFError) as caught:
        merge_command(str(tmp_path), str(tmp_path / "out"))
    assert str(caught.value) == (
        f"{tmp_path}/config.json is truncated, or not a JSON file; download it again"
    )
    with pytest.raises(RLHFError) as caught:
        merge_command(str(tmp_path), str(tmp_path))
    assert str(caught.value) == f"{tmp_path} is not empty; choose a new folder"


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message') }}{% endif %}"
)
PARTS = "{% for m in messages %}<|im_start|>{{ m.content[0].text }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [2, 1]),
        (NEEDS_SYSTEM + CHATML, [2, 1]),
        (PARTS, [2, 1]),
        ("{{ raise_exception('any row') }}", 1),
        (None, 1),
    ],
)
def test_generation_ends_where_the_trained_turn_ends(
    template: str | None, ends: Any, tmp_path: Path
) -> None:
    module = module_of("tied")
    module.save_weights(module.state_dict(), tmp_path)
    save_tokenizer_and_config(module.model, chatml_tokenizer(template), tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == ends
    assert generation.pad_token_id == 4
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == template


def test_published_values_of_sampling_are_exported_without_do_sample(tmp_path: Path) -> None:
    module = module_of("tied")
    module.save_weights(module.state_dict(), tmp_path)
    module.causal.generation_config.temperature = 0.9
    save_tokenizer_and_config(module.model, chatml_tokenizer(None), tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.9
