"""Keys of a config.json that other programs or transformers versions have written."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_models import SIZES, config_of, empty, load, write_model
from transformers import LlamaConfig

from rlhf.errors import RLHFError
from rlhf.model.exported import exported_model
from rlhf.model.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_model(tmp_path / "model", LlamaConfig(**SIZES)))


def add(folder: Path, **keys: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return str(folder)


ATTENTIONS = ("flash_attention_2", "kernels-community/flash-attn", "eager", "nonsense", 5, None)


@pytest.mark.parametrize(
    "keys",
    [
        *({name: value} for name in ("attn_implementation", "_attn_implementation")
          for value in (*ATTENTIONS, {"": "flash_attention_3"})),
        {"_attn_implementation_internal": "flash_attention_2"},
    ],
    ids=str,
)  # fmt: skip
def test_the_attention_that_a_config_names_has_no_effect(
    keys: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    expected = load(config_of(str(folder))).default_attention
    path = add(folder, **keys)
    for stage in (0, 3):
        module = load(config_of(path), stage=stage)
        assert module.default_attention == expected
    assert empty(config_of(path)).default_attention == expected
    assert exported_model(folder, "causal").config._attn_implementation == expected
    module.save_weights(module.state_dict(), tmp_path / "written")
    assert "attn" not in (tmp_path / "written" / "config.json").read_text()


@pytest.mark.parametrize(
    "keys",
    [
        {"a_key_of_another_program": {"x": [1]}}, {"architectures": None}, {"architectures": []},
        {"architectures": [None]}, {"architectures": 5}, {"torch_dtype": "bf16"},
        {"dtype": None}, {"quantization_config": None}, {"transformers_version": 5},
        {"unsloth_version": "2025.1"}, {"gradient_checkpointing": True}, {"use_flash_attn": True},
        {"_attn_implementation_autoset": True}, {"_flash_attn_2_enabled": True},
    ],
    ids=str,
)  # fmt: skip
def test_other_keys_have_no_effect(keys: dict[str, Any], folder: Path) -> None:
    path = add(folder, **keys)
    for stage in (0, 3):
        load(config_of(path), stage=stage)
    empty(config_of(path))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"dtype": "bf16"}, "module 'torch' has no attribute 'bf16'"),
        ({"quantization_config": "gptq"}, "'str' object has no attribute 'to_dict'"),
        ({"hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
        ({"pad_token_id": 99}, "Padding_idx must be within num_embeddings"),
        ({"text_config": {"a": 1}}, "'dict' object has no attribute 'to_dict'"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "KeyError: 'nonsense'"),
    ],
    ids=str,
)
def test_a_value_that_transformers_cannot_follow_is_an_error_of_the_config(
    keys: dict[str, Any], problem: str, folder: Path
) -> None:
    path = add(folder, **keys)
    with pytest.raises(RLHFError) as error:
        empty(config_of(path))
    assert str(error.value) == (
        f"{path}/config.json describes no model that transformers can open ({problem}); correct "
        "it, or choose another model.path"
    )


def test_the_tokenizer_is_not_blamed_for_the_config(folder: Path) -> None:
    path = add(folder, dtype="bf16")
    with pytest.raises(RLHFError, match=r"/config\.json describes no model that transformers can"):
        load_tokenizer(config_of(path))
