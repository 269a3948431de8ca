"""After the demo: what the held-out rows say before and after."""

from pathlib import Path
from typing import Any

from rlhf.demo import print_before_and_after

SHOWN = {
    "rewards/margins": ("reward of right less wrong", "8.3f"),
    "logps/chosen": ("log-probability of right", "8.1f"),
    "logps/rejected": ("log-probability of wrong", "8.1f"),
    "loss": ("loss", "8.3f"),
}


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after. A reward is what a solution has gained over the
    reference: at the start nothing."""
    print_before_and_after(folder, "held-out solutions", SHOWN)
