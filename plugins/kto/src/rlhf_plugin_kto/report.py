"""The report after the demo: metrics of the held-out rows before and after."""

from pathlib import Path
from typing import Any

from rlhf_demo import LOG_RATIOS, print_before_and_after


def report(config: Any, folder: Path) -> None:
    """Print the held-out metrics before and after."""
    print_before_and_after(folder, "held-out solutions", LOG_RATIOS)
