"""After the demo: what the held-out pairs say before and after."""

from pathlib import Path
from typing import Any

from rlhf.demo import print_before_and_after

SHOWN = {
    "rewards/accuracies": ("right answer gained more than wrong", "8.1%"),
    "rewards/margins": ("reward of right less wrong", "8.3f"),
    "logps/chosen": ("log-probability of right", "8.1f"),
    "logps/rejected": ("log-probability of wrong", "8.1f"),
    "loss": ("loss", "8.3f"),
}


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after. A reward is what an answer has gained over the
    reference: at the start nothing."""
    print_before_and_after(folder, "held-out pairs", SHOWN)
