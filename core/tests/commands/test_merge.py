"""`rlhf merge`: what it prints, and refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import SIZES, write_model
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig

from rlhf.commands.main import main
from rlhf.commands.merge import merge_command
from rlhf.errors import RLHFError


def test_merge_prints_only_what_it_has_merged(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LlamaConfig(**SIZES))
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    # A process that has not imported DeepSpeed yet, whose import logs.
    command = [sys.executable, "-m", "rlhf", "merge", "adapter", "merged"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"merged adapter into {base} and wrote merged\n"


def test_weights_of_the_base_that_a_merged_model_lacks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(tmp_path / "base", Glm4MoeConfig(**SIZES, first_k_dense_replace=2))
    weights = load_file(f"{base}/model.safetensors")
    predicts_further = {
        f"model.layers.92.{name}": torch.zeros(2) for name in ("enorm.weight", "hnorm.weight")
    }
    save_file(weights | predicts_further, f"{base}/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    capsys.readouterr()
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().err == (
        f"warning: {base} has 2 weights that Glm4MoeForCausalLM does not use: "
        "model.layers.92.enorm.weight and model.layers.92.hnorm.weight\n"
    )
    assert load_file(tmp_path / "merged/model.safetensors").keys() == weights.keys()


def test_an_output_that_is_an_address_is_refused() -> None:
    with pytest.raises(RLHFError) as error:
        merge_command("adapter", "s3://bucket/merged")
    assert str(error.value) == (
        "cannot write to s3://; choose a local path (buckets: docs/observers.md)"
    )
