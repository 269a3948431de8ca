"""Logged numbers as curves and samples as text and images, in `tensorboard/` of the run folder."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from rlhf.hookspecs import RunRecord, curves, hookimpl, sample_table


class TensorBoard:
    """Writes every logged number as a scalar, and samples as a table with their images beside it.
    A resumed run hides what was logged after its checkpoint."""

    def __init__(self) -> None:
        self._made: SummaryWriter | None = None

    def _writer(self, run: RunRecord, step: int) -> SummaryWriter:
        if self._made is None:
            self._made = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step)
        return self._made

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in curves(metrics).items():
            self._writer(run, step).add_scalar(name, value, step)

    on_eval = on_step

    @hookimpl
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(step, samples)
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._writer(run, step).add_text("samples", text, step)
        for number, sample in enumerate(samples, 1):
            for place, url in enumerate(sample.get("images", ()), 1):
                tag = f"samples/{number}/image {place}"
                self._writer(run, step).add_image(tag, _pixels(url), step, dataformats="HWC")

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        if self._made is not None:
            self._made.close()


def _pixels(url: str) -> NDArray[np.uint8]:
    """Return the picture of a data URL [height, width, 3]."""
    return np.asarray(Image.open(BytesIO(b64decode(url.partition(",")[2]))).convert("RGB"))


def _cell(value: Any) -> str:
    """Return a value as a cell of a table in Markdown."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
