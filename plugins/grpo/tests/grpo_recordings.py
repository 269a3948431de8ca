"""Runs that others replay, and the files of their rollouts."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from attrs import frozen

from rlhf_devkit.curves import Metrics


@frozen
class Recording:
    """A run folder and the lines of its metrics."""

    folder: Path
    metrics: Metrics


def table(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of a rollout."""
    rows: list[dict[str, Any]] = pa.ipc.open_file(pa.memory_map(str(file))).read_all().to_pylist()
    return rows
