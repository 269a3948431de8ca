"""Logged numbers as curves, in `tensorboard/` of the run folder."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from rlhf.hookspecs import RunRecord, curves, hookimpl


class TensorBoard:
    """Writes every logged number as a scalar. A resumed run hides what was logged after its
    checkpoint."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step)
        for name, value in curves(metrics).items():
            self._writer.add_scalar(name, value, step)

    on_eval = on_step

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()
