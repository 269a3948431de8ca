"""The card of an adapter: how vLLM serves it."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest

from rlhf_tools.card import card


@pytest.mark.parametrize(
    ("settings", "needs_merge"),
    [
        ({}, False),
        ({"use_rslora": True, "exclude_modules": ["v_proj"]}, False),
        ({"use_dora": True}, True),
        ({"modules_to_save": ["norm"]}, True),
        ({"target_parameters": ["experts.down_proj"]}, True),
        ({"bias": "all"}, True),
        ({"use_variant_of_tomorrow": True}, True),
    ],
    ids=str,
)
def test_an_adapter_is_served_unmerged_only_if_all_its_settings_are_known(
    settings: dict[str, Any], needs_merge: bool, tmp_path: Path
) -> None:
    peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    text = card(tmp_path, tmp_path, "policy", [])
    assert ("vllm serve MERGED" in text) == needs_merge
    assert ("--enable-lora --lora-modules adapter=MODEL" in text) != needs_merge
