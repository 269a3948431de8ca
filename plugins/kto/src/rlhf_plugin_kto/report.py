"""The report after the demo: metrics of the held-out rows before and after."""

from pathlib import Path
from typing import Any

from rlhf.demo import print_before_and_after

SHOWN = {
    "rewards/margins": ("reward of right minus wrong", "8.3f"),
    "logps/chosen": ("log-probability of right", "8.1f"),
    "logps/rejected": ("log-probability of wrong", "8.1f"),
    "loss": ("loss", "8.3f"),
}


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after. The reward of a solution is beta times its
    log-ratio to the reference, 0 at the start."""
    print_before_and_after(folder, "held-out solutions", SHOWN)
