"""From packing to the last backward pass of a step, the host never waits for the device, so that
the device always has work while the host prepares more."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from image_runs import TRAINER, write_run
from rlhf_devkit import short_run
from rlhf_devkit.families import FAMILIES
from rlhf_devkit.tiny import waits_of_step
from rlhf_devkit.waits import Wait

ON_THE_CPU = "image_attention"
"""A function that reads where images end only to compute attention in plain torch."""


def waits(trainer: str, words: list[str], folder: Path) -> list[Wait]:
    """Return the waits of a step of several micro-batches."""
    words = [*words, "--output", str(folder / "run")]
    micro_batches, found = waits_of_step(trainer, words, str(folder / "cache"))
    assert micro_batches > 1
    return [wait for wait in found if not any(ON_THE_CPU in caller for caller in wait.where)]


matrix = pytest.mark.matrix
TEXT: Any = ["Llama", "Qwen3.5", *(pytest.param(it, marks=matrix) for it in ("Mixtral", "Bamba"))]


@pytest.mark.parametrize("family", TEXT)
def test_the_host_does_not_wait_in_a_step_on_text(family: str, tmp_path: Path) -> None:
    words = short_run(tmp_path, "preference")
    tokenizer = AutoTokenizer.from_pretrained(words[words.index("--model") + 1])
    config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**options | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "family")
    tokenizer.save_pretrained(tmp_path / "family")
    words += ["--model.path", str(tmp_path / "family"), "--batch.tokens", "128"]
    assert waits("dpo", words, tmp_path) == []


OTHERS = (
    "Qwen2.5-VL", "Qwen3.5", "Qwen3-VL-MoE", "Qwen3.5-MoE", "GLM-4V", "LLaVA", "InternVL",
    "Gemma 3", "Gemma 4 E2B", "Mistral 3", "Pixtral", "LFM2-VL", "LLaVA-NeXT", "LLaVA-OneVision",
)  # fmt: skip
IMAGES: Any = ["Qwen3-VL", "Gemma 4", *(pytest.param(it, marks=matrix) for it in OTHERS)]
TRAINED: Any = ["[language, projector, vision]", pytest.param("[language]", marks=matrix)]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", IMAGES)
def test_the_host_does_not_wait_in_a_step_on_images(
    family: str, trained: str, tmp_path: Path
) -> None:
    # The folder's name is unique, as names of modules have to be.
    file = tmp_path / f"{tmp_path.name}_trainer.py"
    file.write_text(TRAINER)
    words = write_run(family, tmp_path)
    words += ["--model.train", trained, "--batch.tokens", "64"]
    assert waits(f"{file}:Pictured", words, tmp_path) == []
