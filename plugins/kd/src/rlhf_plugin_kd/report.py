"""After the demo: how close the student is to its teacher on held-out rows."""

from pathlib import Path
from typing import Any

from rlhf_demo import print_before_and_after

SHOWN = {
    "kl": ("KL(teacher, student), nats per token", "8.3f"),
    "agreement": ("same most likely token", "8.1%"),
}


def report(config: Any, folder: Path) -> None:
    """Print the divergence and the agreement before and after."""
    print_before_and_after(folder, f"held-out rows, teacher {config.kd.teacher}", SHOWN)
