"""The report after a demo on sums: held-out ones before and after."""

from pathlib import Path
from typing import Any

from rlhf_demo import print_before_and_after

SHOWN = {
    "rewards/solved/mean": ("worked out without a mistake", "8.1%"),
    "rewards/right_lines/mean": ("right lines", "8.1%"),
    "completions/mean_length": ("tokens of an answer", "8.1f"),
}


def report(config: Any, folder: Path) -> None:
    """Print the share of held-out sums that are right before and after."""
    print_before_and_after(folder, "held-out sums, most likely answer", SHOWN)
