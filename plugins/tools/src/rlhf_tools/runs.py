"""`rlhf runs`: one line for each run in a folder. Imports no torch."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError
from rlhf_tools.recorded import Recorded, is_run, read_newest
from rlhf_tools.table import print_table
from rlhf_tools.template import number

COLUMNS = ("name", "trainer", "model", "step", "state", "loss", "evaluation", "age")


def runs_command(folder: str, *, as_json: bool) -> int:
    """Print one line for each run in `folder`, the newest last; returns 0."""
    root = Path(folder)
    if not root.is_dir():
        raise RLHFError(f"{folder} is not a folder; pass the folder that contains the runs")
    paths = sorted((path for path in root.iterdir() if is_run(path)), key=_changed)
    rows = [_row(read_newest(path)) for path in paths]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in {folder}")
    else:
        print_table([COLUMNS, *([_text(key, row) for key in COLUMNS] for row in rows)])
    return 0


def _row(run: Recorded) -> dict[str, Any]:
    evaluation = {name: value for name, value in run.last.items() if name.startswith("eval/")}
    failed_at_start = run.state == "failed" and not run.has_stepped
    return {
        "name": run.name,
        "trainer": run.trainer,
        "model": run.model,
        "step": run.step,
        "steps": run.steps,
        "state": "failed at start" if failed_at_start else run.state,
        "loss": _finite(run.last.get("loss")),
        "evaluation": {name: _finite(value) for name, value in evaluation.items()},
        "age": max(0.0, round(time.time() - _changed(run.path), 1)),
    }


def _text(key: str, row: dict[str, Any]) -> str:
    """Return a row's cell. The first metric of an evaluation is its loss."""
    value = row[key]
    match key:
        case "step":
            return f"{value:,} of {row['steps']:,}" if row["steps"] else f"{value:,}"
        case "evaluation":
            return next((number(metric) for metric in value.values()), "-")
        case "age":
            units = [(86400, "d"), (3600, "h"), (60, "min"), (0, "s")]
            size, unit = next(each for each in units if value >= each[0])
            return f"{value / (size or 1):.0f} {unit}"
    return number(value)


def _changed(path: Path) -> float:
    """Return when a run last wrote about itself."""
    files = [path / name for name in ("metrics.jsonl", "summary.json", "config.yaml")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _finite(value: float | None) -> float | None:
    """Return None for what JSON cannot hold, such as nan."""
    return value if value is not None and math.isfinite(value) else None
