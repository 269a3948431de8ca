"""The report after the demo: how held-out answers are ranked before and after, and some
rewards."""

from pathlib import Path
from typing import Any

import rlhf_demo
from rlhf_demo import print_before_and_after
from rlhf_plugin_rm.scorer import Scorer

SHOWN = {
    "accuracy": ("pairs in the right order", "8.1%"),
    "margin": ("mean margin, better - worse", "8.3f"),
    "loss": ("loss", "8.3f"),
}
SAMPLES = 2


def report(config: Any, folder: Path) -> None:
    """Print the measures before and after, and two questions with the rewards of their answers, the
    highest first."""
    print_before_and_after(folder, "held-out answers", SHOWN)
    scorer = Scorer(folder / "model")
    for row in rlhf_demo.rows("ranked", "eval", "preference")[:SAMPLES]:
        rewards = scorer.rewards(row["prompt"], row["answers"])
        print(f"\n> {row['prompt'].strip()}\n reward  rank  answer")
        for reward, rank, answer in sorted(
            zip(rewards, row["ranks"], row["answers"], strict=True), reverse=True
        ):
            print(f"{reward:7.2f} {rank:5d}  {answer.replace(chr(10), ', ')}")
