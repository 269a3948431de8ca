"""What a demo has changed: held-out metrics of its first and its last evaluation, as a table."""

import json
from collections.abc import Mapping
from pathlib import Path

LOG_RATIOS = {
    "rewards/margins": ("reward margin, right - wrong", "8.3f"),
    "logps/chosen": ("log-probability, right", "8.1f"),
    "logps/rejected": ("log-probability, wrong", "8.1f"),
    "loss": ("loss", "8.3f"),
}
"""Metrics of trainers whose reward is beta times an answer's log-ratio to the reference, which is 0
at the start."""


def print_before_and_after(folder: Path, title: str, shown: Mapping[str, tuple[str, str]]) -> None:
    """Print under `title` a line for each of `shown`, {metric: (what it is, format)}, of the run in
    `folder`, which evaluated before its first step. Metrics are named without `eval/`."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [line for line in lines if "eval/loss" in line]
    width = max(len(title), *(len(text) for text, _ in shown.values()))
    print(f"\n{title:{width}}   before    after")
    for name, (text, shape) in shown.items():
        old, new = before[f"eval/{name}"], after[f"eval/{name}"]
        print(f"{text:{width}} {old:{shape}} {new:{shape}}")
