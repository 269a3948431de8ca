"""The run of docs/tools.md that learns to call a tool."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import FENCED
from rlhf_devkit import shared, tiny

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
HELD_OUT = "[{path: demo:arithmetic, split: eval, limit: 4}]"
SHORT = {
    "sft": ("--train.steps", "2", "--optim.warmup", "0", "--batch.size", "8"),
    "grpo": ("--train.steps", "2", "--optim.warmup", "0", "--batch.size", "2",
             "--data.eval", HELD_OUT),
}  # fmt: skip


def commands() -> dict[str, list[str]]:
    """The words of both runs of the page, by trainer."""
    (block,) = (text for _, text in FENCED.findall(PAGE.read_text()) if "python calc" in text)
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if line.startswith("rlhf run ")]
    return {trainer: rest for _, _, trainer, *rest in words}


def metrics_of(folder: Path, short: bool) -> list[dict[str, Any]]:
    """Make the runs of the page in a folder and return the metrics of the last one."""
    (code,) = (text for _, text in FENCED.findall(PAGE.read_text()) if "def sum_of" in text)
    (folder / "calculator.py").write_text(code)
    names: dict[str, Any] = {"__name__": "calculator"}
    exec(compile(code, "calculator.py", "exec"), names)
    names["write_base"](folder / "base")
    rows = folder / "conversations.jsonl"
    names["write_conversations"](rows)
    if short:
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:64]))
    metrics: list[dict[str, Any]] = []
    for trainer, words in commands().items():
        # Paths of the page are relative to the folder of the commands.
        here = [re.sub(r"^(base$|conv|calc|runs/)", rf"{folder}/\1", word) for word in words]
        if short:
            here += SHORT[trainer]
        metrics = shared(1).run(tiny.run, trainer, here, str(folder / "cache"), timeout=900)[0]
    return metrics


def test_the_run_of_the_page_calls_the_tool(tmp_path: Path) -> None:
    metrics = metrics_of(tmp_path, short=True)
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2]
    assert all("tools/call_frequency" in line for line in metrics if "loss" in line)


@pytest.mark.matrix
def test_the_run_of_the_page_learns_to_call_the_tool(tmp_path: Path) -> None:
    evaluations = [line for line in metrics_of(tmp_path, short=False) if "eval/loss" in line]
    first, last = evaluations[0], evaluations[-1]
    assert first["eval/reward"] < 0.6
    assert last["eval/reward"] > 0.8
    assert last["eval/tools/call_frequency"] > 0.9 > 0.6 > first["eval/tools/call_frequency"]
