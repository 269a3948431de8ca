"""Runs that differ in the learning rate only."""

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from rlhf import run
from rlhf.cli import Request


def sweep(request: Request, *, rates: Sequence[float]) -> int:
    """Train once per rate, each in a folder of its own, and print the last losses; returns 0."""
    config = request.config
    for rate in rates:
        optim = evolve(config.optim, lr=rate)
        output = str(Path(config.output or "sweep") / f"lr-{rate:g}")
        result = run(
            evolve(config, optim=optim, output=output),
            nproc=request.nproc,
            overwrite=request.overwrite,
        )
        losses = [line.get("loss", line.get("eval/loss")) for line in result.metrics]
        print(f"lr {rate:g}  loss {losses[-1]:.4f}")
    return 0
