"""The report after the demo: metrics of the held-out pairs before and after."""

from pathlib import Path
from typing import Any

from rlhf_demo import LOG_RATIOS, print_before_and_after

ACCURACY = {"rewards/accuracies": ("reward accuracy", "8.1%")}


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after."""
    print_before_and_after(folder, "held-out pairs", {**ACCURACY, **LOG_RATIOS})
