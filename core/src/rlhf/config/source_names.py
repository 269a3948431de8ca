"""What the name of a model or of data stands for: the demo's, a local path or a name on the hub."""

from pathlib import Path

DEMO_MODEL = "demo:base"
"""The name of the base model that the package contains."""


def without_revisions(path: str) -> str:
    """Return what the model at `path` is, in words, if it has no revisions; "" for a name on the
    hub."""
    if path == DEMO_MODEL:
        return f"the embedded model {DEMO_MODEL}"
    return "a local folder" if local_path(path).is_dir() else ""


def is_local(path: str) -> bool:
    """Return whether `path` cannot be a name on the hub, which is NAME or OWNER/NAME."""
    return path.startswith((".", "~", "/")) or path.endswith("/") or path.count("/") > 1


def local_path(path: str) -> Path:
    """Return the path of a file or folder, in which `~/` is the home folder."""
    return Path.home() / path[2:] if path.startswith("~/") else Path(path)
