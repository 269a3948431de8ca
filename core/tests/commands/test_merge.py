"""`rlhf merge`: what it prints."""

import subprocess
import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from small_models import SIZES, write_model
from transformers import AutoModelForCausalLM, LlamaConfig


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
