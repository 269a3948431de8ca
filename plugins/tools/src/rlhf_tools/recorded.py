"""A run as its folder records it, whether it is running, finished, stopped or failed. Imports no
torch."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.cli import is_running, load_yaml, read_json, read_lines
from rlhf.errors import RLHFError, counted
from rlhf.plugin import documented

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e300


def is_count(value: Any) -> bool:
    """Return whether a value is a number of things."""
    return type(value) is int and 0 <= value < 2**53


def is_picture(value: Any) -> bool:
    """Return whether a value is a picture that a page can show: a data URL in JPEG."""
    return isinstance(value, str) and PICTURE.fullmatch(value) is not None


def fits(value: Any, shape: Any) -> bool:
    """Return whether plain data has a shape.

    A shape is a type, None, a function such as `is_number`, a tuple of alternatives, `[shape]` for
    a list, `{str: shape}` for a mapping with any keys, or a mapping with the shape of each key,
    which may be absent if its name here ends with `?`.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            fits(value.get(name), inner) for name, inner in _keys(value, shape)
        )
    if isinstance(shape, type):
        return type(value) is shape
    return value is None if shape is None else bool(shape(value))


def _keys(value: Mapping[str, Any], shape: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the keys that a mapping should have, with their shapes."""
    if str in shape:
        return [(name, shape[str]) for name in value]
    names = {name.removesuffix("?"): (name, inner) for name, inner in shape.items()}
    return [
        (name, inner)
        for name, (written, inner) in names.items()
        if name in value or name == written
    ]


_COUNTS = ("rows", "examples", "tokens", "trained", "labels", "too_long", "cut", "empty")
_ENTRIES = ([{"path": str}], None)
_SECONDS = ({str: is_number}, None)
_TEXT = (str, None)

CONFIG = {"model": {"path": str}, "data": {"train?": _ENTRIES, "eval?": _ENTRIES}}
PLAN = {str: {"model?": ({"path": str}, None), "task?": _TEXT}}
VERSIONS = {"trainer": str}
SUMMARY = {
    "steps": (is_count, None), "ended": _TEXT, "error": _TEXT, "devices": _TEXT,
    "seconds": _SECONDS, "startup": _SECONDS,
    "data": {str: {f"{name}?": is_count for name in _COUNTS}},
    "memory": ({"peak": is_number, "device": is_number, "parts": {str: is_number}}, None),
}  # fmt: skip
"""The entries of these files that are read; the page shows others as they are."""
SAMPLE = {
    "row": str, "prompt": str, "answers": [str], "scores?": [(int, float, [(int, float)])],
    "which?": str,
    "images?": [is_picture],
}  # fmt: skip
"""A line of samples.jsonl. Scores may be nan."""


FILES = ("config.yaml", "summary.json", "metrics.jsonl")
"""Files of which each run has one, however early it failed."""
SHAPES: Mapping[str, Mapping[Any, Any]] = {
    "config.yaml": CONFIG, "plan.json": PLAN, "versions.json": VERSIONS, "summary.json": SUMMARY,
}  # fmt: skip
SHOWN_STATES = {
    "done": "done", "patience": "done", "failed": "failed",
    "stop_at": "stopped", "hours": "stopped", "signal": "stopped",
}  # fmt: skip
"""State by the reason why the training ended."""
TAIL = 2**16
"""Bytes at the end of metrics.jsonl that hold the newest values."""

Curve = list[tuple[int, float]]
"""(step, value) of a metric, in the order of the steps."""


@documented
@frozen(kw_only=True)
class Recorded:
    """What the folder of one run holds, without what is damaged. A missing file counts as empty."""

    path: Path
    """The run folder."""
    config: Mapping[str, Any]
    """From config.yaml."""
    plan: Mapping[str, Any]
    """From plan.json."""
    versions: Mapping[str, Any]
    """From versions.json."""
    summary: Mapping[str, Any]
    """From summary.json."""
    state: str
    """`running`, `done`, `stopped` or `failed`."""
    last: Mapping[str, float]
    """The newest value of every metric."""
    curves: Mapping[str, Curve]
    """The finite values of every metric, as (step, value)."""
    samples: Sequence[Mapping[str, Any]] = ()
    """The lines of samples.jsonl."""
    left_out: Sequence[str] = ()
    """What is damaged, such as `1 line of metrics.jsonl`."""

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
        return self.config.get("model", {}).get("path")

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
    return _recorded(path, until=until, samples=read_lines(path / SAMPLES))


def read_newest(path: Path) -> Recorded:
    """Return a run with the end of its curves, which reads only the end of its metrics."""
    return _recorded(path, tail=TAIL)


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return any((path / name).is_file() for name in FILES)


def _recorded(
    path: Path,
    *,
    until: float = math.inf,
    tail: int = 0,
    samples: Sequence[dict[str, Any] | None] = (),
) -> Recorded:
    if not is_run(path):
        raise RLHFError(
            f"{path} is not a run folder: it has no config.yaml; pass RUN, as in runs/sft-1"
        )
    left_out: list[str] = []
    files = {name: _entries(path / name, shape, left_out) for name, shape in SHAPES.items()}
    summary = files["summary.json"]
    state = _state(path, summary)
    lines = read_lines(path / METRICS, tail=tail)
    whole = [sample for sample in samples if sample is not None and fits(sample, SAMPLE)]
    if state != "running":  # Else the last line may still be written.
        for name, num in ((METRICS, lines.count(None)), (SAMPLES, len(samples) - len(whole))):
            left_out += [f"{counted(num, 'line')} of {name}"] if num else []
    last, curves = _curves(line for line in lines if line is not None and line["step"] <= until)
    return Recorded(
        path=path, config=files["config.yaml"], plan=files["plan.json"],
        versions=files["versions.json"], summary=summary, state=state, last=last, curves=curves,
        samples=[sample for sample in whole if sample["step"] <= until], left_out=left_out,
    )  # fmt: skip


def _entries(path: Path, shape: Mapping[Any, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the entries of a file without those that are damaged, which are added to `left_out`;
    if the file as a whole is, its name."""
    entries: dict[str, Any] = {}
    with suppress(RLHFError):  # A file that is missing or damaged.
        entries = load_yaml(path) if path.suffix == ".yaml" else read_json(path)
    if not entries and path.is_file():
        left_out.append(path.name)
    damaged = [
        name
        for name, value in entries.items()
        if (expected := shape.get(name, shape.get(str))) and not fits(value, expected)
    ]
    left_out += [f"{name} of {path.name}" for name in damaged]
    return {name: value for name, value in entries.items() if name not in damaged}


def _curves(records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Curve]]:
    """Return the newest value of every metric, and its finite values by step."""
    last: dict[str, float] = {}
    curves: dict[str, Curve] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if type(value) is float or is_number(value):
                last[name] = value
            if is_number(value) and name != "step":
                curves[name].append((record["step"], value))
    return last, curves


def _state(path: Path, summary: Mapping[str, Any]) -> str:
    if is_running(path):
        return "running"
    if not summary:  # A run of a release before summary.json.
        return "done" if (path / "model").is_dir() else "stopped"
    # A run that a signal killed says nothing of its end.
    return SHOWN_STATES.get(summary.get("ended") or "failed", "failed")
