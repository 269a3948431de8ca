"""The calls that an observer receives in a short run, without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.config.sections import Config
from rlhf.hookspecs import RunRecord
from rlhf.registry.observers import hooks_of

SETTINGS = {"model.path": "base", "optim.lr": 1e-5, "data.train": [{"path": "rows.jsonl"}]}
PLAN = {"policy": {"summary": "ZeRO 2, bf16", "stage": 2, "trained": True}}

SAMPLES: list[Mapping[str, Any]] = [
    {"row": "rows.jsonl:1", "prompt": "1 + 1 =", "answers": ["2", "3\n|"], "scores": [0.5, -1.0]}
]
PICTURE = (
    "data:image/jpeg;base64,/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAP///////////////////////////////////"
    "///////////////////////////////////////////////////2wBDAf///////////////////////////////////"
    "///////////////////////////////////////////////////wAARCAACAAQDASIAAhEBAxEB/8QAFQABAQAAAAAAA"
    "AAAAAAAAAAAAAL/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFQEBAQAAAAAAAAAAAAAAAAAAAQP/xAAUEQEAAAAAAAAAA"
    "AAAAAAAAAAA/9oADAMBAAIRAxEAPwCQAo//2Q=="
)
"""A picture of 4 x 2 red pixels."""
PICTURED: list[Mapping[str, Any]] = [
    {"row": "rows.jsonl:1", "prompt": "Who?", "answers": ["red", "blue"], "images": [PICTURE] * 2},
    {"row": "rows.jsonl:2", "prompt": "And?", "answers": ["no"]},
]
"""Samples of rows with two images and with none."""


def call_hooks(
    observer: object,
    folder: Path,
    steps: Sequence[int],
    *,
    error: BaseException | None = None,
    samples: Sequence[Mapping[str, Any]] = SAMPLES,
) -> RunRecord:
    """Call the hooks of `observer` as a run of these steps in `folder`, and return its record.

    The loss of step k is 1 / k. After the last step there are an evaluation (`eval/loss` 0.5) with
    `samples`, a checkpoint and the end, with `error`. Another call for the folder is the same run,
    resumed. What the observer raises is raised.
    """
    run = RunRecord(
        name="sft", folder=folder, config=Config(), steps=steps[-1], id=f"id-of-{folder.name}",
        settings=SETTINGS, plan=PLAN,
    )  # fmt: skip
    hooks = hooks_of(observer)
    hooks.on_start(run=run)
    for step in steps:
        hooks.on_step(run=run, step=step, metrics={"loss": 1 / step, "counts": [1.0, 2.0]})
    hooks.on_eval(run=run, step=steps[-1], metrics={"eval/loss": 0.5})
    hooks.on_samples(run=run, step=steps[-1], samples=samples)
    checkpoint = folder / "checkpoints" / f"step-{steps[-1]:06}"
    hooks.on_checkpoint(run=run, step=steps[-1], directory=checkpoint)
    hooks.on_finish(run=run, error=error)
    return run
