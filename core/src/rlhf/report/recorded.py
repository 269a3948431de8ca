"""A run as its folder records it, whether it is running, finished, stopped or failed. Imports no
torch."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError
from rlhf.folder.run_folder import SAMPLES, is_running, logged, read_json
from rlhf.request.settings_tree import load_yaml

FILES = ("config.yaml", "summary.json", "metrics.jsonl")
"""Files of which each run has one, however early it failed."""
SHOWN_STATES = {
    "done": "done", "patience": "done", "failed": "failed",
    "stop_at": "stopped", "hours": "stopped", "signal": "stopped",
}  # fmt: skip
"""State by the reason why the training ended."""
TAIL = 2**16
"""Bytes at the end of metrics.jsonl that hold the newest values."""

Curve = list[tuple[int, float]]
"""(step, value) of a metric, in the order of the steps."""


@frozen(kw_only=True)
class Recorded:
    """What the folder of one run holds. Missing and damaged files count as empty."""

    path: Path
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, Any]
    summary: Mapping[str, Any]
    state: str
    """`running`, `done`, `stopped` or `failed`."""
    last: Mapping[str, float]
    """The newest value of every metric."""
    curves: Mapping[str, Curve]
    samples: Sequence[Mapping[str, Any]] = ()
    """The lines of samples.jsonl."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.absolute().name

    @property
    def trainer(self) -> str | None:
        """None if the run failed before it recorded its configuration."""
        return Path(self.versions["trainer"]).name if "trainer" in self.versions else None

    @property
    def model(self) -> str | None:
        model = self.config.get("model")
        return str(model["path"]) if isinstance(model, Mapping) and "path" in model else None

    @property
    def has_stepped(self) -> bool:
        """Whether the run ended its first step."""
        return self.step > 0 or bool(self.summary.get("startup"))

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def steps(self) -> int | None:
        """Steps of the whole schedule, if they are known."""
        return self.summary.get("steps")


def read_run(path: Path, *, until: float = math.inf) -> Recorded:
    """Return a run with its curves and samples up to the step `until`. Raises RLHFError if `path`
    is not the folder of a run."""
    samples = logged(path, until=until, name=SAMPLES)
    return _recorded(path, logged(path, until=until), samples=samples)


def read_newest(path: Path) -> Recorded:
    """Return a run with the end of its curves, which reads only the end of its metrics."""
    return _recorded(path, logged(path, tail=TAIL))


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return any((path / name).is_file() for name in FILES)


def _recorded(path: Path, records: Iterable[Mapping[str, Any]], **more: Any) -> Recorded:
    if not is_run(path):
        raise RLHFError(
            f"{path} is not a run folder: it has no config.yaml; pass RUN, as in runs/sft-1"
        )
    last: dict[str, float] = {}
    curves: dict[str, Curve] = defaultdict(list)
    for record in records:
        values = {name: each for name, each in record.items() if type(each) in (int, float)}
        last.update(values)
        step = int(values.pop("step", 0))
        for name, value in values.items():
            if math.isfinite(value):
                curves[name].append((step, value))
    config: Mapping[str, Any] = {}
    with suppress(RLHFError):  # A file that is missing or damaged.
        config = load_yaml(path / "config.yaml")
    summary = read_json(path / "summary.json")
    return Recorded(
        path=path, config=config, plan=read_json(path / "plan.json"),
        versions=read_json(path / "versions.json"), summary=summary, state=_state(path, summary),
        last=last, curves=curves, **more,
    )  # fmt: skip


def _state(path: Path, summary: Mapping[str, Any]) -> str:
    if is_running(path):
        return "running"
    if not summary:  # A run of a release before summary.json.
        return "done" if (path / "model").is_dir() else "stopped"
    # A run that a signal killed says nothing of its end.
    return SHOWN_STATES.get(summary.get("ended") or "failed", "failed")
