"""The records of `demo:arithmetic`, `base`, `equations`, `ranked` and `sums`, without torch."""

from functools import partial
from typing import Any

from rlhf.plugin import DemoPlugin
from rlhf_demo import base_model_folder, rows


def settings(trainer: str) -> dict[str, Any]:
    """Return nothing: who names these rows names the model too."""
    return {}


arithmetic, base, equations, ranked, sums = (
    DemoPlugin(rows=partial(rows, name), model_folder=base_model_folder, settings=settings)
    for name in ("arithmetic", "base", "equations", "ranked", "sums")
)
