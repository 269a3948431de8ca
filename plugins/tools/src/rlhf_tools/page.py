"""One HTML page about several runs, which needs no network. Rows of data in it are escaped."""

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from attrs import define

from rlhf.cli import leaves
from rlhf.hookspecs import CORE_METRICS
from rlhf_tools import chart
from rlhf_tools.recorded import Recorded
from rlhf_tools.template import filled

GIB = 2**30
MOST_PICTURES = 2**22
"""Bytes of all small pictures of images on a page."""
RATES = ("grad_norm", "learning_rate", "tokens_per_s")
"""Core's metrics that are shown after the loss and those of the trainer."""
HIDDEN = CORE_METRICS - {"step", "loss", "router_loss", *RATES}
"""Core's other metrics, shown when they are chosen."""


def page(runs: Sequence[Recorded]) -> str:
    """Return the page."""
    curves = [run.curves for run in runs]
    names = list(dict.fromkeys(name.removeprefix("eval/") for name in chain(*curves)))
    names.sort(key=lambda name: (name != "loss", name in HIDDEN, name in RATES))
    return filled(
        Path(__file__).with_name("page.html"),
        runs=[_shown(run, label) for run, label in zip(runs, labels(runs), strict=True)],
        charts=[chart.chart(name, curves) for name in names],
        clock=clock, hidden=HIDDEN, size=chart, evaluation=evaluation(runs),
        differences=differences([run.config for run in runs]),
        versions=_table([run.versions for run in runs]),
        written=time.strftime("%Y-%m-%d %H:%M"), pictures=Pictures(),
    )  # fmt: skip


@define
class Pictures:
    """The small pictures of images on a page, as many as fit `MOST_PICTURES`."""

    left_out: int = 0
    """How many did not fit."""
    _size: int = 0

    def of(self, sample: Mapping[str, Any]) -> list[str]:
        """Return the pictures of a sample that are shown, as data URLs."""
        shown = []
        for picture in sample.get("images", ()):
            fits = self._size + len(picture) <= MOST_PICTURES
            self._size += len(picture) * fits
            self.left_out += not fits
            shown += [picture] * fits
        return shown


def clock(seconds: float) -> str:
    """Return a duration, such as 1 h 02 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def labels(runs: Sequence[Recorded]) -> list[str]:
    """Return the names of the runs' folders, or their paths if two names are equal."""
    names = [run.name for run in runs]
    return names if len({*names}) == len(names) else [str(run.path) for run in runs]


def evaluation(runs: Sequence[Recorded]) -> list[tuple[str, list[chart.Curve]]]:
    """Return each metric of the evaluations with the curve of each run."""
    names = dict.fromkeys(n for run in runs for n in run.curves if n.startswith("eval/"))
    return [(n.removeprefix("eval/"), [run.curves.get(n, []) for run in runs]) for n in names]


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which the runs differ, without their folders."""
    rows = _table([leaves(config) for config in configs])
    return [(key, row) for key, row in rows if key != "output" and row != row[:1] * len(row)]


def before_and_after(samples: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the first and the last sample of each held-out row, or of each place in the order of
    rewards."""
    by_row: dict[Any, list[Any]] = {}
    for sample in samples:
        by_row.setdefault(sample.get("which", sample.get("row")), []).append(sample)
    return [(each[0], each[-1]) for each in by_row.values()]


def _shown(run: Recorded, label: str) -> dict[str, Any]:
    """Return what the template shows of a run besides its curves."""
    memory = run.summary.get("memory")
    measured = max((value for _, value in run.curves.get("peak_memory_gib", [])), default=None)
    return {
        "label": label, "run": run, "samples": before_and_after(run.samples),
        "seconds": run.summary.get("seconds") or {}, "measured": measured,
        "startup": run.summary.get("startup") or {},
        "parts": {n: size / GIB for n, size in memory["parts"].items() if size} if memory else {},
        "estimated": memory and memory["peak"] / GIB,
        "device": memory and memory["device"] / GIB,
    }  # fmt: skip


def _table(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    keys = dict.fromkeys(chain(*columns))
    return [(key, [column.get(key) for column in columns]) for key in keys]
