"""What every backend has to prove, and the curves of DeepSpeed's stage 3."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_devkit import BackendConformance

STAGE_3 = ("deepspeed", "--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")


class TestFullyShard(BackendConformance):
    backend = "fully_shard"
    precisions = ("fp32",)


def run(trainer: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run four steps on two ranks into `folder` and return the lines of metrics.jsonl."""
    command = [sys.executable, "-m", "rlhf", "run", trainer, "--nproc", "2"]
    command += ["--model", "demo:base", "--data", "demo:arithmetic", "--model.dtype", "fp32"]
    command += ["--batch.size", "16", "--train.steps", "4", "--optim.lr", "1e-4"]
    command += ["--checkpoint.every", "2", "--output", str(folder), "--backend", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_the_curve_is_that_of_stage_3_also_after_a_resume(trainer: str, tmp_path: Path) -> None:
    expected = run(trainer, tmp_path / "zero", *STAGE_3)
    straight = run(trainer, tmp_path / "straight", "fully_shard")
    names = [name for name in ("loss", "grad_norm", "margin", "eval/loss") if name in expected[0]]
    for name in names:
        known = [line[name] for line in expected if name in line]
        assert [line[name] for line in straight if name in line] == pytest.approx(known, rel=1e-5)
    run(trainer, tmp_path / "resumed", "fully_shard", "--train.stop_at", "2")
    resumed = run(trainer, tmp_path / "resumed", "fully_shard", "--resume")
    assert [line.get("loss") for line in resumed] == [line.get("loss") for line in straight]
    zero, whole, later = (
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("zero", "straight", "resumed")
    )
    assert zero.keys() == whole.keys()
    assert all(torch.allclose(whole[name], zero[name], atol=1e-5) for name in zero)
    assert all(torch.equal(whole[name], later[name]) for name in whole)
