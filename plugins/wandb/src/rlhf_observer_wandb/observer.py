"""A Weights & Biases run for each rlhf run, which a resumed run continues."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import wandb
from PIL import Image

from rlhf.hookspecs import RunRecord, curves, hookimpl, sample_table
from rlhf_observer_wandb import WandbConfig


class Wandb:
    """Sends configuration, plans, curves, samples and the newest checkpoint."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    @hookimpl
    def on_start(self, run: RunRecord) -> None:
        config = self._config
        self.remedy = (
            f"without a connection to {wandb.setup().settings.base_url}, set observers.wandb.mode "
            "to offline"
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            mode=config.mode,
            id=run.id,
            resume="allow",
            name=run.folder.name,
            job_type=run.name,
            dir=str(run.folder),
            config={**run.settings, "plan": dict(run.plan)},
            # A run of the user's own stays open, and the terminal stays as it is.
            settings=wandb.Settings(console="off", reinit="create_new"),
        )
        # Steps that a resumed run takes again would come too late for the counter of wandb.
        self._run.define_metric("*", step_metric="step")

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **curves(metrics)})

    on_eval = on_step

    @hookimpl
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(step, samples)
        values: dict[str, Any] = {"eval/samples": wandb.Table(columns=columns, data=rows)}
        pictures = {sample["row"]: sample["images"] for sample in samples if sample.get("images")}
        if pictures:
            values["eval/images"] = _images(pictures)
        self._run.log({"step": step, **values})

    @hookimpl
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        self._run.summary["checkpoint"] = str(directory)

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        self._run.finish(exit_code=int(error is not None))


def _images(pictures: Mapping[str, Sequence[str]]) -> list[wandb.Image]:
    """Return data URLs by their rows, on white to one size: wandb shows others distorted."""
    opened = {
        f"{row}: image {number}": Image.open(BytesIO(b64decode(url.partition(",")[2])))
        for row, urls in pictures.items()
        for number, url in enumerate(urls, 1)
    }
    widths, heights = zip(*(picture.size for picture in opened.values()), strict=True)
    shown = []
    for caption, picture in opened.items():
        canvas = Image.new("RGB", (max(widths), max(heights)), "white")
        canvas.paste(picture)
        shown.append(wandb.Image(canvas, caption=caption))
    return shown
