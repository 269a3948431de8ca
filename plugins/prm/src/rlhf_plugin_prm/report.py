"""The report after the demo: how held-out steps are judged before and after, and some
probabilities."""

from pathlib import Path
from typing import Any

import rlhf_demo
from rlhf_demo import print_before_and_after
from rlhf_plugin_prm.scorer import Scorer

SHOWN = {
    "auc": ("AUC, right against wrong steps", "8.1%"),
    "accuracy": ("steps classified correctly", "8.1%"),
    "first_error_accuracy": ("first error predicted correctly", "8.1%"),
    "loss": ("loss", "8.3f"),
}


def report(config: Any, folder: Path) -> None:
    """Print the measures before and after, and a right and a wrong solution with the probability
    that each of their steps is right."""
    print_before_and_after(folder, "held-out steps", SHOWN)
    scorer = Scorer(folder / "model")
    rows = rlhf_demo.rows("arithmetic", "eval", "stepwise")
    for right in (True, False):
        row = next(row for row in rows if all(row["labels"]) == right)
        print(f"\n> {row['prompt'].strip()}\np(right)  is     step")
        probabilities = scorer.probabilities(row["prompt"], row["completions"])
        for probability, label, step in zip(
            probabilities, row["labels"], row["completions"], strict=True
        ):
            print(f"{probability:8.2f}  {'right' if label else 'wrong'}  {step}")
