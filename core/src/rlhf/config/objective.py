"""The objective in `checkpoint.best`: a metric, and whether it should rise or fall."""

import functools
import re

FALLING = {"loss"}
RISING = {"accuracy", "accuracies", "margin", "margins", "auc", "f1"}
"""Words in the name of a metric that tell its direction."""


@functools.cache
def objective(text: str) -> tuple[str, int]:
    """Return the metric that `text` names, and 1 if it should rise or -1 if it should fall.

    The direction is its leading sign, or follows from a word of its name. Raises ValueError if
    neither tells it.
    """
    name = text.lstrip("+-")
    if not name.startswith("eval/"):
        raise ValueError(f"expected a metric of an evaluation such as eval/loss, got {text}")
    if text != name:
        return name, -1 if text.startswith("-") else 1
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if bool(words & FALLING) == bool(words & RISING):
        raise ValueError(f"{name} needs a direction; write +{name} or -{name} (rise or fall)")
    return name, -1 if words & FALLING else 1
