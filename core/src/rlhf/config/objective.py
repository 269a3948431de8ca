"""What `checkpoint.best` asks for: a metric and whether it should rise or fall."""

import functools
import re

FALLS = {"loss"}
RISES = {"accuracy", "accuracies", "margin", "margins", "auc", "f1"}
"""What is known of a metric by a word of its name."""


@functools.cache
def objective(text: str) -> tuple[str, int]:
    """The metric that `checkpoint.best` names and whether it should rise (1) or fall (-1): by its
    leading sign, else by a word of its name. Raises ValueError where neither says so."""
    name = text.lstrip("+-")
    if not name.startswith("eval/"):
        raise ValueError(f"a metric of an evaluation is expected, such as eval/loss, not {text}")
    if text != name:
        return name, -1 if text.startswith("-") else 1
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if bool(words & FALLS) == bool(words & RISES):
        raise ValueError(f"say whether {name} should rise or fall: +{name} or -{name}")
    return name, -1 if words & FALLS else 1
