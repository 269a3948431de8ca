"""What the name of a model or of data stands for: the demo's, a local path or a name on the hub."""

from contextlib import suppress
from pathlib import Path

from rlhf.errors import RLHFError

DEMO = "demo:"
"""What the names of models and data that packages contain begin with."""


def without_revisions(path: str) -> str:
    """Return what the model at `path` is, in words, if it has no revisions; "" for a name on the
    hub."""
    if path.startswith(DEMO):
        return f"the embedded model {path}"
    return "a local folder" if local_path(path).is_dir() else ""


def is_local(path: str) -> bool:
    """Return whether `path` cannot be a name on the hub, which is NAME or OWNER/NAME."""
    return path.startswith((".", "~", "/")) or path.endswith("/") or path.count("/") > 1


def local_path(path: str) -> Path:
    """Return the path of a file or folder, in which `~` is a home folder."""
    with suppress(RuntimeError):  # No such user.
        return Path(path).expanduser()
    return Path(path)


def check_not_missing(path: str, setting: str) -> None:
    """Raise RLHFError if `path`, the value of `setting`, is a local path but not a folder."""
    folder = local_path(path)
    if not folder.is_dir() and (folder.exists() or is_local(path)):
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise RLHFError(f"{setting} {path} {problem}; pass a model folder or a name on the hub")


def check_model_folder(path: str, setting: str = "model.path") -> None:
    """Raise RLHFError if `path`, the value of `setting`, is a local path without a model, such as
    an adapter or a run folder, or with an adapter beside the model. Names on the hub are
    accepted."""
    check_not_missing(path, setting)
    folder = local_path(path)
    is_model = any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    if (folder / "adapter_config.json").is_file():
        if is_model:
            raise RLHFError(
                f"{setting} {path} has the weights of a model and an adapter_config.json, whose "
                "adapter transformers would put on them; move the adapter's files to a folder of "
                "their own"
            )
        remedy = "merge it first with rlhf merge"
        if setting == "model.path":
            remedy = f"set model.adapter to it and model.path to its base, or {remedy}"
        raise RLHFError(f"{setting} {path} is an adapter; {remedy}")
    is_run = (folder / "config.yaml").is_file() and (folder / "model").is_dir()
    if is_run and not (folder / "config.json").is_file():
        raise RLHFError(f"{setting} {path} is a run folder; did you mean {folder / 'model'}?")
