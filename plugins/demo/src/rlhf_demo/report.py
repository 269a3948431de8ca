"""The table after a demo: metrics of the held-out rows before and after."""

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
    `folder`. Metrics are named without `eval/`. Prints nothing if metrics.jsonl has no evaluation
    of step 0."""
    from rlhf.cli import read_lines  # late: start-up time

    names = [f"eval/{name}" for name in shown]
    evaluations = [
        record
        for record in read_lines(folder / "metrics.jsonl")
        if record and all(isinstance(record.get(name), int | float) for name in names)
    ]
    if not evaluations or evaluations[0]["step"] > 0:
        return
    before, after = evaluations[0], evaluations[-1]
    width = max(len(title), *(len(text) for text, _ in shown.values()))
    print(f"\n{title:{width}}   before    after")
    for name, (text, shape) in shown.items():
        old, new = before[f"eval/{name}"], after[f"eval/{name}"]
        print(f"{text:{width}} {old:{shape}} {new:{shape}}")
