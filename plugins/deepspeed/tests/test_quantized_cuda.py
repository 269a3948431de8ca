"""An adapter on a base in 4 bits (QLoRA), on a CUDA device."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_demo import base_model_folder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("bitsandbytes") is None,
    reason="needs a CUDA device and bitsandbytes",
)

STEPS = 12


def lines(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run SFT on rows that are new to the embedded model, evaluated on rows like its own; returns
    the lines of metrics.jsonl."""
    words = [
        "--model.dtype", "bf16", "--nproc", "1",
        "--data.train", "{path: demo:arithmetic, split: train, limit: 256}",
        "--data.eval", "{path: demo:equations, split: eval, limit: 32}",
        "--batch.size", "16", "--batch.tokens", "2048", "--optim.lr", "5e-3",
        "--train.steps", f"{STEPS}", "--train.eval_at_start", "true", "--output", str(folder),
    ]  # fmt: skip
    command = [sys.executable, "-m", "rlhf", "run", "sft", *words, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(lines: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in lines if name in line]


def rounded(folder: Path) -> str:
    """Write the embedded model with the weights that its layers have in 4 bits."""
    from bitsandbytes import functional

    shutil.copytree(base_model_folder(), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.detach().to("cuda")
            kept = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            module.weight.data = functional.dequantize_4bit(*kept).cpu()
    model.save_pretrained(folder)
    return str(folder)


def test_an_adapter_on_a_base_in_4_bits_learns_resumes_and_is_continued(tmp_path: Path) -> None:
    adapted = ("--lora.rank", "8")
    quantized = ("--model", "demo:base", "--model.quantize", "nf4", *adapted)
    straight = lines(tmp_path / "straight", *quantized)
    before, after = losses(straight, "eval/loss")
    base = ("--model", rounded(tmp_path / "base"))
    plain = lines(tmp_path / "plain", *base, *adapted, "--train.stop_at", "1")
    assert before == pytest.approx(losses(plain, "eval/loss")[0], rel=2e-2)
    trained = losses(straight)
    assert trained[-1] < 0.7 * trained[0]

    lines(tmp_path / "resumed", *quantized, "--train.stop_at", "5")
    resumed = lines(tmp_path / "resumed", *quantized, "--resume")
    assert losses(resumed)[-STEPS:] == pytest.approx(trained, rel=1e-2)

    adapter = ("--model.adapter", str(tmp_path / "straight" / "model"))
    again = lines(tmp_path / "again", *quantized[:4], *adapter, "--train.stop_at", "1")
    assert losses(again, "eval/loss")[0] == pytest.approx(after, rel=1e-2)
