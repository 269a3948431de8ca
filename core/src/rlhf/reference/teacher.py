"""A teacher beside the policy, or its k likeliest tokens at every prediction and the mass of all
others, computed once and kept on disk as the reference's log-probabilities are."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

from rlhf.config.sections import ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.cache import cache_root
from rlhf.engine import Engine
from rlhf.model.head import Head
from rlhf.readouts.distillation import COMPARED_ROWS
from rlhf.readouts.teachers import TopTeacher
from rlhf.reference.table import weights_digest

if TYPE_CHECKING:
    from rlhf.run.context import Run

ATTACHED = "teacher"
"""The examples' value per token: k token ids (whole in float32 up to 16 million), their
log-probabilities, that of all other tokens together."""


@frozen(kw_only=True)
class CachedTeacher:
    """What stands in for a teacher's engine once its distributions are on disk."""

    top: int
    """Tokens that are kept of each prediction's distribution."""

    def at(self, batch: PackedBatch) -> TopTeacher:
        """The teacher at the batch's predictions."""
        values = batch.values[ATTACHED].index_select(0, batch.predict_at)
        # A filler's values have no width.
        values = values.view(len(batch.predict), 2 * self.top + 1)
        return TopTeacher(values[:, : self.top].long(), values[:, self.top :])


def running_teacher(run: "Run", model: ModelConfig) -> Engine:
    """`model` as a frozen engine of role `teacher`. Collective."""
    engine = run.load(ATTACHED, model=model, trained=False)
    parameters = run.shapes[ATTACHED].parameters
    run.notes.append(f"teacher    {model.path}: {parameters:,} parameters, a second model, frozen")
    return engine


def cached_teacher(
    run: "Run", model: ModelConfig, *, top: int, temperature: float
) -> CachedTeacher:
    """The distributions of `model` at every prediction of the run's examples, at `temperature`:
    what is not on disk is computed now, and the engine for it is given up again. Collective."""

    def folder() -> Path:
        config = evolve(run.config, model=model, lora=None)
        digest = run.mesh.gather(weights_digest(config) if run.mesh.rank == 0 else "")[0]
        return cache_root() / "teacher" / f"{digest}-top{top}-temperature{temperature:g}"

    done = run.cached(
        ATTACHED,
        folder,
        partial(run.load, ATTACHED, model=model, trained=False),
        read=partial(top_tokens, top=top, temperature=temperature),
        width=2 * top + 1,
    )
    if ATTACHED in run.engines:
        run.release(ATTACHED)
    run.notes.append(f"teacher    its {top} likeliest tokens: {done}")
    return CachedTeacher(top=top)


def top_tokens(engine: Engine, batch: PackedBatch, *, top: int, temperature: float) -> Tensor:
    """What is stored of each prediction [N, 2 top + 1], float32. Collective at stage 3."""

    def readout(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        parts = hidden.index_select(0, batch.predict_from).split(COMPARED_ROWS)
        return {"top": torch.cat([_top(part, head, top, temperature) for part in parts])}

    return engine(batch, readout)["top"]


def _top(hidden: Tensor, head: Head, top: int, temperature: float) -> Tensor:
    """hidden [n, H] -> [n, 2 top + 1]."""
    logprobs = head.logits(hidden).div_(temperature).log_softmax(-1)
    likeliest, tokens = logprobs.topk(top, dim=-1)
    rest = logprobs.scatter_(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([tokens.float(), likeliest, rest], dim=-1)
