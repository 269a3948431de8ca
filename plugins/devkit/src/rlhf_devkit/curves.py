"""Comparison of runs by their metrics and their exported weights."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.hookspecs import MEASURED

Metrics = list[dict[str, Any]]
"""The lines of a run's metrics.jsonl."""
EVALUATION = "eval/"


def same_curve(metrics: Metrics, expected: Metrics) -> None:
    """Assert that two runs have the same loss (to 1e-5) and gradient norm (to 1e-4) at every step,
    and the same numbers in the last evaluation (to 1e-4)."""
    differs = "{} differs from the run in plain torch: at step {} {} instead of {}"
    for name, absolute, relative in (("loss", 1e-5, 1e-5), ("grad_norm", 0.0, 1e-4)):
        for step, (actual, reference) in enumerate(
            zip(column(metrics, name), column(expected, name), strict=True), start=1
        ):
            assert actual == pytest.approx(reference, abs=absolute, rel=relative), differs.format(
                name, step, actual, reference
            )
    assert metrics[-1] == pytest.approx(expected[-1], abs=1e-4, rel=1e-4), (
        "the last evaluation differs from that of the run in plain torch"
    )


def training(metrics: Metrics) -> Metrics:
    """Return the lines of training steps, without those of evaluations."""
    return [line for line in metrics if not any(name.startswith(EVALUATION) for name in line)]


def column(metrics: Metrics, name: str) -> list[float]:
    """Return one metric of the training steps, in their order."""
    return [line[name] for line in training(metrics)]


def without_timings(metrics: Metrics) -> Metrics:
    """Return the lines without what depends on the machine, and without what the transfer of
    weights to a server has taken."""
    return [{k: v for k, v in line.items() if not is_measured(k)} for line in metrics]


def is_measured(name: str) -> bool:
    """Return whether equal runs may have other values of a metric."""
    return name in MEASURED or name.endswith("/seconds") or name.startswith("sync/")


def weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the exported weights of a run by file name."""
    return {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
