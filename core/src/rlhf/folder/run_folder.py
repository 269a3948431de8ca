"""The run folder: the contract with every other tool, locked while a run writes to it."""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from rlhf.config.sections import Config
from rlhf.config.structure import structure
from rlhf.errors import RLHFError
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder.disk import write_whole, writing
from rlhf.request.layers import changed_keys, load_yaml, to_tree
from rlhf.request.reader import Request

MAY_CHANGE = (
    "batch.tokens", "train.stop_at", "train.hours", "train.patience", "train.trace",
    "train.log_every", "train.eval_every", "train.eval_at_start", "data.eval", "data.workers",
    "data.processes", "checkpoint", "model.recompute", "observers", "output", "backend",
)  # fmt: skip
"""What a resumed run may change: nothing that alters what is learnt. The backend's section may
too."""

OURS = ("checkpoints", "model", "traces")
"""Folders in a run's own."""

RECORDED = (
    "rlhf-core", "torch", "transformers", "deepspeed", "peft", "datasets", "torchdata", "pluggy",
    "numpy", "triton", "liger-kernel",
)  # fmt: skip


def choose(request: Request) -> Path:
    """The folder of this run. Raises RLHFError when it holds a run and neither --resume nor
    --overwrite is given."""
    if request.config.output is None:
        if request.resume is not None or request.overwrite:
            flag = "--resume" if request.resume is not None else "--overwrite"
            raise RLHFError(f"{flag} needs to know the run folder: give it with --output")
        return _first_free(Path("runs"), request.name)
    folder = Path(request.config.output)
    if holds_run(folder) and request.resume is None and not request.overwrite:
        raise RLHFError(
            f"{folder} already holds a run: go on with --resume, replace it with --overwrite, "
            "or give another --output"
        )
    if folder.exists() and not folder.is_dir():
        raise RLHFError(f"output {folder} is a file: give a folder")
    if folder.name in OURS and holds_run(folder.parent):
        raise RLHFError(f"output {folder} belongs to the run in {folder.parent}: give another")
    return folder


def holds_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    whole = checkpoint.all_checkpoints(folder / "checkpoints")
    return (folder / "config.yaml").exists() or bool(whole)


def check_resumable(request: Request, folder: Path, *, verified: bool = False) -> Path | None:
    """Return the checkpoint to continue from, or None to start at the beginning. Raises RLHFError
    for a damaged checkpoint, or for a changed key that a resumed run may not change. `verified`
    says that a first call has read the checkpoint's files, which can take minutes."""
    if request.resume is None:
        return None
    checkpoints = folder / "checkpoints"
    if not holds_run(folder):
        # A requeued job may start here; one that names a checkpoint may not.
        return _wanted(checkpoints, request.resume, contents=not verified)
    before = load_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    if not before:
        raise RLHFError(
            f"{folder} has no config.yaml, or an empty one, beside its checkpoints: put it back, "
            "or start again with --overwrite"
        )
    free = [*MAY_CHANGE, request.config.backend_name]
    if request.config.model.fp8 is not None:
        free.remove("batch.tokens")  # Products in FP8 are scaled by what stands in a micro-batch.
    changes = {
        key: values
        for key, values in changed_keys(
            _completed(before, type(request.config)), to_tree(request.config)
        ).items()
        if not any(key == name or key.startswith(f"{name}.") for name in free)
    }
    if changes:
        told = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changes.items())
        raise RLHFError(f"{folder} cannot be resumed with another configuration: {told}")
    return _wanted(checkpoints, request.resume, contents=not verified)


def _wanted(checkpoints: Path, name: str, *, contents: bool) -> Path | None:
    """Return the checkpoint of that name, or the newest one if the name is empty."""
    if name:
        return checkpoint.named(checkpoints, name, contents=contents)
    return checkpoint.newest(checkpoints, contents=contents)


def _completed(tree: dict[str, Any], cls: type[Config]) -> dict[str, Any]:
    """The tree of a run by an older release, with the defaults of what that did not know yet."""
    config, _ = structure(tree, cls)
    return tree if config is None else to_tree(config)


def logged(folder: Path, *, until: int) -> list[str]:
    """The whole lines of a run's metrics.jsonl up to that step; none where there is no such
    file."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if _logged_step(line, default=until + 1) <= until]


class RunFolder:
    """Rank 0's hand on the folder. `close` gives the lock back."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
        if fresh:
            _clear(path)

    def write_config(self, tree: Mapping[str, Any]) -> None:
        write_whole(self.path / "config.yaml", yaml.safe_dump(dict(tree), sort_keys=False))

    def write_json(self, name: str, value: Any) -> None:
        write_whole(self.path / name, json.dumps(value, indent=1, default=str) + "\n")

    def write_versions(self, **more: Any) -> None:
        """What the run ran on; no environment variables, no host names."""
        versions: dict[str, Any] = {"python": platform.python_version()}
        for name in RECORDED:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        self.write_json("versions.json", versions | more)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cut_metrics(self, step: int) -> None:
        """Drop what was logged after `step`, so that a resumed run writes it once; a torn last line
        goes too."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            write_whole(path, "".join(line + "\n" for line in logged(self.path, until=step)))

    def close(self) -> None:
        self._lock.close()


def _first_free(parent: Path, name: str) -> Path:
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _lock(path: Path) -> IO[str]:
    file = (path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RLHFError(
            f"{path} is being written by another run (process {owner}): "
            "wait for it or give another --output"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _clear(path: Path) -> None:
    """Remove what a former run left; foreign files stay."""
    for name in OURS:
        shutil.rmtree(path / name, ignore_errors=True)
    for name in ("config.yaml", "plan.json", "versions.json", "metrics.jsonl"):
        (path / name).unlink(missing_ok=True)


def _logged_step(line: str, *, default: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return default
