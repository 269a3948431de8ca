"""A Trackio run for each rlhf run, which a resumed run continues."""

import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trackio
from PIL import Image

from rlhf.hookspecs import RunRecord, curves, hookimpl, sample_table
from rlhf_observer_trackio import TrackioConfig


class Trackio:
    """Sends configuration, plans, curves, samples and the names of checkpoints; an alert if a run
    fails."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self.remedy = _remedy(config)

    @hookimpl
    def on_start(self, run: RunRecord) -> None:
        self._run = trackio.init(
            project=self._config.project,
            # Trackio finds the run that it continues by its name.
            name=f"{run.folder.name}-{run.id}",
            resume="allow",
            group=self._config.group,
            space_id=self._config.space,
            config={**run.settings, "plan": dict(run.plan)},
            embed=False,
        )

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(curves(metrics), step=step)

    on_eval = on_step

    @hookimpl
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(step, samples)
        pictures = {sample["row"]: sample["images"] for sample in samples if sample.get("images")}
        if pictures:
            columns = [*columns, "images"]
            rows = [[*row, [*map(_image, pictures.get(row[1], ()))]] for row in rows]
        self._run.log({"samples": trackio.Table(columns=columns, data=rows)}, step=step)

    @hookimpl
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        self._run.log({"checkpoint": directory.name}, step=step)

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        if error is not None:
            self._run.alert("failed", text=str(error), level=trackio.AlertLevel.ERROR)
        self._run.finish()


def _image(url: str) -> trackio.Image:
    """Return the picture of a data URL."""
    return trackio.Image(Image.open(BytesIO(b64decode(url.partition(",")[2]))))


def _remedy(config: TrackioConfig) -> str:
    """Return what to do if the Space or the server does not answer."""
    space, server = os.environ.get("TRACKIO_SPACE_ID"), os.environ.get("TRACKIO_SERVER_URL")
    if config.space is not None:
        place, setting = f"the Space {config.space}", "observers.trackio.space"
    elif space:
        place, setting = f"the Space {space}", "TRACKIO_SPACE_ID"
    elif server:
        # Without the token.
        place, setting = urlsplit(server).netloc, "TRACKIO_SERVER_URL"
    else:
        return ""
    return f"without a connection to {place}, remove {setting} to log to this machine"
