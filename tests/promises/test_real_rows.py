"""A short run on real rows with a real pretrained model, where they are at hand."""

import importlib.util
import json
from pathlib import Path

import pytest

import sft_runs
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_rows.py"


@pytest.mark.parametrize(
    ("rows", "steps", "share"),
    [pytest.param("tinystories", 20, 0.98, marks=pytest.mark.matrix), ("gsm8k", 12, 0.8)],
)
def test_the_held_out_loss_of_a_pretrained_model_falls(
    rows: str, steps: int, share: float, real_data: Path, two: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("real_rows", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = module.words(real_data, rows, 2, 3, tmp_path / "run")
    words += ["--train.steps", str(steps), "--optim.warmup", "2"]
    # The rows of these steps, and enough held-out ones.
    for split, file, limit in (("train", "train.jsonl.gz", 16 * steps), ("eval", "eval.jsonl", 40)):
        source = {"path": str(real_data / "sft" / f"{rows}.{file}"), "limit": limit}
        words += [f"--data.{split}", json.dumps([source])]
    (code, metrics), _ = two.run(sft_runs.run, words, str(inputs.cache), timeout=300)
    assert code == 0
    before, after = (line["eval/loss"] for line in metrics if "eval/loss" in line)
    assert after < share * before
