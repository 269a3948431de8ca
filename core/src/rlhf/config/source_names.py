"""What the name of a model stands for: the demo's model, a folder or a model on the hub."""

from pathlib import Path

DEMO_MODEL = "demo:base"
"""The name of the base model that the package contains."""


def without_revisions(path: str) -> str:
    """Return what the model at `path` is, in words, if it has no revisions; "" for a name on the
    hub."""
    if path == DEMO_MODEL:
        return f"the embedded model {DEMO_MODEL}"
    return "a local folder" if Path(path).is_dir() else ""
