"""The run folder: the files that other tools read, locked while a run writes to it."""

import errno
import itertools
import json
import math
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout

from rlhf.config.structure import structure
from rlhf.errors import RLHFError, first_line, place_of
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder.disk import REFUSED, write_whole, writing
from rlhf.launch.signals import DAY, Stopped
from rlhf.request.reader import Request
from rlhf.request.settings_tree import (
    changed_keys,
    flow,
    load_recorded,
    to_tree,
    without,
    without_removed,
)

MAY_CHANGE = (
    "batch.tokens", "train.stop_at", "train.hours", "train.patience", "train.log_every",
    "train.eval_every", "train.eval_at_start", "train.samples", "data.eval", "data.workers",
    "data.processes", "checkpoint", "model.recompute", "model.revision", "observers", "output",
    "backend", "rollouts.keep",
)  # fmt: skip
"""Settings that a resumed run may change, since they do not affect what is learnt; those in the
section of its backend, or of the backend that it had before, and in that of the engine of its
rollouts too."""

LOCK_WAIT = 1.0
"""Seconds to wait for the lock, which `is_running` holds for a moment."""

RANKS = "ranks"
"""Folder with the place of each rank, while a run writes to it or after it has failed."""

ROLLOUTS = "rollouts"
"""Folder with a file for each rollout of an on-policy trainer, `STEP.arrow`."""
HELD_OUT = "eval-"
"""What the names of rollouts of evaluations begin with."""

FOLDERS = ("checkpoints", "model", "errors", RANKS, ROLLOUTS)
"""Folders that a run makes in its own."""

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""Files with a line of JSON for each logged step and evaluation, and for each sample."""

EXTRA_FILE = "extra/parameters.safetensors"
"""File of a trainer's own parameters in a model folder. It is in a folder of its own, since servers
such as vLLM load every safetensors file in the model's folder."""

FILES = ("config.yaml", "plan.json", "versions.json", "summary.json", METRICS, SAMPLES)
"""Files that a run writes, besides its lock."""

RECORDED = (
    "rlhf-core", "rlhf-kernels", "rlhf-rollouts", "rlhf-rows", "rlhf-vision", "torch",
    "transformers", "deepspeed", "peft", "datasets", "torchdata", "pluggy", "numpy", "torchvision",
    "triton", "liger-kernel", "flash-linear-attention", "mamba-ssm",
)  # fmt: skip


@cache
def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        return metadata.version(distribution)
    return None


def choose(request: Request) -> Path:
    """Return the folder of this run; without --output a new one, which is created, so that no other
    run takes it. Raises RLHFError if it already contains a run and neither --resume nor --overwrite
    was passed."""
    if request.config.output is None:
        if request.resume is not None or request.overwrite:
            flag = "--resume" if request.resume is not None else "--overwrite"
            raise RLHFError(f"{flag} needs the run folder; pass --output")
        numbered = (Path("runs") / f"{request.name}-{number}" for number in itertools.count(1))
        return next(folder for folder in numbered if _is_created(folder))
    folder = Path(request.config.output)
    with writing(folder):
        _check_output(folder, request)
    return folder


def _check_output(folder: Path, request: Request) -> None:
    """Raise RLHFError for an `output` that is taken, or not a folder."""
    if holds_run(folder) and request.resume is None and not request.overwrite:
        raise RLHFError(
            f"{folder} already contains a run; continue it with --resume, replace it with "
            "--overwrite, or choose another --output"
        )
    if folder.exists() and not folder.is_dir():
        raise RLHFError(f"output {folder} is a file; choose a folder")
    if folder.name in FOLDERS and holds_run(folder.parent):
        raise RLHFError(f"output {folder} belongs to the run in {folder.parent}; choose another")


@contextmanager
def chosen(request: Request) -> Iterator[Path]:
    """Yield the folder of this run. A new one that is still empty after the block is removed: the
    run has failed, or a signal has ended its ranks during their set-up."""
    folder = choose(request)
    try:
        yield folder
    finally:
        if request.config.output is None:
            with suppress(OSError):
                folder.rmdir()


def _is_created(folder: Path) -> bool:
    """Create the folder; return False if it exists."""
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.parent.is_dir():
                return False
            # Such as a link to a disk that is not mounted.
            problem = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, problem, str(folder.parent)) from None
    return True


def holds_run(folder: Path) -> bool:
    """Return whether a run has written to this folder."""
    whole = checkpoint.all_checkpoints(folder / "checkpoints")
    return (folder / "config.yaml").exists() or bool(whole)


def check_resumable(request: Request, folder: Path, *, verified: bool = False) -> Path | None:
    """Return the checkpoint to continue from, or None to start at step 0.

    Raises RLHFError for a damaged checkpoint and for a changed setting that a resumed run may not
    change. `verified` says that an earlier call has read the checkpoint's files, which can take
    minutes.
    """
    if request.resume is None:
        return None
    if holds_run(folder):
        _check_settings(request, folder)
    # A requeued job may start in a folder without a run, but not one that names a checkpoint.
    return checkpoint.find(folder / "checkpoints", request.resume, contents=not verified)


def _check_settings(request: Request, folder: Path) -> None:
    """Raise RLHFError for a changed setting that a resumed run may not change."""
    before = _recorded(folder)
    # The backend may be another one, with a section of its own.
    backend = str(before.get("backend") or "")
    free = {*MAY_CHANGE, request.config.backend_name, backend}
    free.add(f"rollouts.{request.config.rollouts.engine}")
    if request.config.model.fp8 is not None:
        free.remove("batch.tokens")  # FP8 rounds differently in other micro-batches.
    kept = without(before, free)
    if request.name not in kept and (others := kept.keys() - to_tree(request.config).keys()):
        raise RLHFError(
            f"{folder} is a run of {', '.join(sorted(others))}, not of {request.name}; resume it "
            "with its own trainer, or choose another --output"
        )
    extensions = [*before.get("extensions", ())], [*request.config.extensions.by_name]
    if extensions[0] != extensions[1]:
        free.add("extensions")
    known = _with_defaults(type(request.config), without(kept, free), folder)
    changes = changed_keys(without(known, free), without(to_tree(request.config), free))
    if "extensions" in free:
        changes["extensions"] = extensions
    if changes:
        changed = ", ".join(
            f"{key}: {_in_words(old)} -> {_in_words(new)}" for key, (old, new) in changes.items()
        )
        raise RLHFError(
            f"{folder} cannot be resumed with another configuration: {changed}; restore "
            "these values, or choose another --output"
        )


def _in_words(value: Any) -> str:
    """Return a setting as YAML in one line, without the empty settings of an entry."""
    if isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if item not in (None, {}, [])}
    return flow([value])


def _recorded(folder: Path) -> dict[str, Any]:
    """Return the settings that a run has recorded. Raises RLHFError if there are none."""
    path = folder / "config.yaml"
    before = load_recorded(path) if path.exists() else {}
    if not before:
        raise RLHFError(
            f"{folder} contains checkpoints, but its config.yaml is missing or empty; restore "
            "it, or start again with --overwrite"
        )
    return before


def _with_defaults(cls: type, before: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return recorded settings with the defaults of those that rlhf or a plugin did not have when
    the run began. Raises RLHFError for one that is not known any more."""
    config, problems = structure(without_removed(cls, before), cls)
    if problems:
        raise RLHFError(
            f"{folder} cannot be resumed, since its config.yaml is not valid now: "
            f"{'; '.join(problems)}; install the versions of rlhf and of its plugins that wrote "
            "it, or choose another --output"
        )
    return to_tree(config)


def day_of(request: Request) -> date:
    """Return the day that the chat templates of a run print: when it was made, or today. A launcher
    of ours tells it to its ranks, so that it is the same at midnight."""
    if DAY in os.environ:
        return date.fromisoformat(os.environ[DAY])
    if request.resume is None or request.config.output is None:
        return date.today()
    summary = read_json(Path(request.config.output) / "summary.json")
    if "day" in summary:
        return date.fromisoformat(summary["day"])
    # A run of an earlier checkout has no record of its day.
    return date.fromtimestamp(summary.get("started", time.time()))


def is_running(folder: Path) -> bool:
    """Return whether a run is writing to this folder."""
    lock = folder / ".lock"
    try:
        # A lock is not created where no run was.
        with FileLock(lock).acquire(blocking=False) if lock.exists() else nullcontext():
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return False  # Of a folder that cannot be written.


def logged(folder: Path, *, until: float = math.inf, name: str = METRICS) -> list[dict[str, Any]]:
    """Return the records in a file of a run up to the step `until`, without damaged lines."""
    lines = read_lines(folder / name)
    return [line for line in lines if line is not None and line["step"] <= until]


def read_lines(path: Path, *, tail: int = 0) -> list[dict[str, Any] | None]:
    """Return the records in a file of a run, and None for each damaged line: after a kill, a full
    disk or a power cut, a line may be incomplete or have NULs. Raises RLHFError if the system
    cannot read the file."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - tail) if tail else 0)
            return [_record(line) for line in file if line.strip()]
    except OSError as error:
        raise RLHFError(f"cannot read {path}: {error.strerror}") from error


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.strip(b"\0").decode())
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    # Larger numbers have no float.
    return record if type(step) is int and 0 <= step < 2**53 else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a run folder; empty if it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def model_folder(path: Path) -> Path:
    """Return `path`/model or `path`, whichever holds weights. Raises RLHFError if none does."""
    for folder in (path / "model", path):
        if any(folder.glob("*.safetensors")):
            return folder
    raise RLHFError(f"{path} has no trained model; pass a run with model/, or a model folder")


def write_error(folder: Path, name: str, text: str) -> Path:
    """Write a traceback into `errors/` of a run folder and return its path."""
    path = folder / "errors" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


class RunFolder:
    """The folder of a run as rank 0 writes to it; locked until `close`."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
        shutil.rmtree(path / RANKS, ignore_errors=True)
        self._fresh = fresh
        self._waiting: list[Callable[[], object]] | None = [] if fresh and holds_run(path) else None
        """What is written once the earlier run has been removed; None if there is none."""
        if self._waiting is None:
            self.begin()

    def begin(self) -> None:
        """Begin to write. What a fresh run replaces remains until then, and for good if the run
        cannot start."""
        waiting, self._waiting = self._waiting or [], None
        if self._fresh:  # Remove the files of an earlier run and no others.
            for name in (name for name in FOLDERS if name != RANKS):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            self._fresh = False
        for write in waiting:
            write()

    def once_begun(self, write: Callable[[], object]) -> None:
        """Call `write` now, or when the earlier run has been removed."""
        if self._waiting is None:
            write()
        else:
            self._waiting.append(write)

    def write_config(self, tree: Mapping[str, Any]) -> None:
        write_whole(self.path / "config.yaml", yaml.safe_dump(dict(tree), sort_keys=False))

    def write_json(self, name: str, value: Any) -> None:
        write_whole(self.path / name, json.dumps(value, indent=1, default=str) + "\n")

    def write_versions(self, **more: Any) -> None:
        """Write the versions of packages, without environment variables and host names."""
        versions = {name: version for name in RECORDED if (version := version_of(name))}
        self.write_json("versions.json", {"python": platform.python_version(), **versions, **more})

    def write_summary(self, **more: Any) -> None:
        """Add what is known of the run as a whole to summary.json."""
        self.write_json("summary.json", read_json(self.path / "summary.json") | more)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Write further lines of METRICS or SAMPLES."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def identity(self) -> str:
        """Return the id of this run, which a resumed run has from before."""
        before = {} if self._waiting is not None else read_json(self.path / "summary.json")
        known = before.get("id")
        return known if isinstance(known, str) and known else uuid.uuid4().hex[:12]

    def cut(self, step: int, *, evaluated: bool) -> None:
        """Remove the lines and rollouts after `step`, which a resumed run writes again, and an
        incomplete last line. Unless it was `evaluated` at `step` for good, the lines of that
        evaluation are removed too."""
        for name in (METRICS, SAMPLES):
            path = self.path / name
            records = [
                record
                for record in logged(self.path, until=step, name=name)
                if evaluated or record["step"] < step or "loss" in record
            ]
            if path.exists():
                write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
        for path in (self.path / ROLLOUTS).glob("*.arrow"):
            written = path.stem.removeprefix(HELD_OUT)
            if written.isdecimal() and int(written) > step:
                path.unlink()

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(OSError):  # The disk may be full, which `error` says.
            if error is not None and self._waiting is None:
                stopped = isinstance(error, Stopped)
                text = ": ".join(filter(None, [place_of(error), first_line(error)]))
                ended = "signal" if stopped else "failed"
                self.write_summary(ended=ended, error=None if stopped else text)
        self.close()


def _lock(path: Path) -> FileLock:
    """Lock the folder until the lock is released or this process dies."""
    lock = FileLock(path / ".lock")
    try:
        # Where no file can be made, FileLock waits as for another process.
        (path / ".lock").touch()
        lock.acquire(timeout=LOCK_WAIT)
    except Timeout:
        raise RLHFError(
            f"another run is writing to {path}; wait for it or choose another --output"
        ) from None
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", None) in REFUSED:
            raise  # `writing` words it.
        raise RLHFError(
            f"cannot lock {path} ({error}); choose an --output on a file system with locks"
        ) from error
    return lock
