"""Answers by transformers' `generate`, of models that `decoder.Rows` does not support."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlhf.engine import Engine, Mesh
from rlhf.rollouts import groups_by_length
from rlhf.trainer import Sample
from rlhf_rollouts.decoder import Limits, Start
from rlhf_rollouts.noise import draw, seed_tensor
from rlhf_rollouts.pictured import inputs_of, placeholder_of, with_image

LONGEST_MATTERS = ("longrope", "dynamic")
"""Kinds of rotary embedding whose frequencies depend on the longest row of a forward."""


def generated(
    engine: Engine, answers: Sequence[Start], limits: Limits, *, mesh: Mesh, pad: int, budget: int
) -> dict[int, Sample]:
    """Return this rank's share of the answers by index. Prompts of similar length run together, as
    many as fit into `budget` tokens, and the groups are distributed over the ranks. Collective."""
    shards, ends, pictured = mesh.shards, limits.ends.tolist(), any(one.inputs for one in answers)
    groups = groups_by_length([len(one.prompt) + one.room for one in answers], budget)
    own: dict[int, Sample] = {}
    for first in range(0, len(groups), shards.size):
        # Every forward may gather weights: a rank without a group repeats the last one.
        group = groups[min(first + shards.rank, len(groups) - 1)]
        if engine.sharded and shards.size > 1:
            group = with_image(answers, group)
        if longest_matters(engine.module.causal):
            # `dynamic` keeps the frequencies of the longest row so far until a short one comes.
            one = torch.zeros(1, 1, dtype=torch.int64, device=engine.device)
            engine.module.model(input_ids=one, use_cache=False)
        drawing = Drawing(
            seed_tensor([answers[n].seed for n in group], engine.device), limits,
            # The model would look for an image there.
            never=placeholder_of(engine.module.causal) if pictured else None,
        )  # fmt: skip
        written = continued(
            engine, [answers[n] for n in group], mesh=mesh, pad=pad, ends=ends,
            logits_processor=LogitsProcessorList([drawing]),
        )  # fmt: skip
        logprobs = torch.stack(drawing.logprobs, 1).tolist()
        for place, tokens, known in zip(group, written, logprobs, strict=True):
            tokens = tokens[: answers[place].room]
            size = next((n for n, token in enumerate(tokens, 1) if token in ends), len(tokens))
            own[place] = Sample(tokens[:size], known[:size], finished=tokens[size - 1] in ends)
    return own


def longest_matters(causal: Any) -> bool:
    """Return whether positions of a transformers model depend on the longest row of a forward."""
    ropes = getattr(causal.config.get_text_config(), "rope_parameters", None) or {}
    kinds = (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict)))
    return any(rope.get("rope_type") in LONGEST_MATTERS for rope in kinds)


def continued(
    engine: Engine,
    answers: Sequence[Start],
    *,
    mesh: Mesh,
    pad: int,
    ends: Sequence[int],
    **options: Any,
) -> list[list[int]]:
    """Return what the engine's model writes after each prompt, until every answer has ended, with
    one of `ends` or for lack of room. The caller cuts off what follows."""
    rows = [torch.tensor(np.asarray(one.prompt, dtype=np.int64)) for one in answers]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    rooms = torch.tensor([one.room for one in answers], device=engine.device)
    criteria = StoppingCriteriaList([RowsFull(rooms + tokens.shape[1])])
    if engine.sharded and mesh.shards.size > 1:
        criteria.append(EosTokenCriteria(list(ends)))
        criteria = StoppingCriteriaList([AllRanksEnded(len(rows), criteria, mesh, engine.device)])
        # A rank must not stop by itself: each forward gathers weights from all ranks.
        ends = ()
    # The last token of a row is not read.
    last = max(len(one.prompt) + one.room for one in answers) - 2
    clamped = engine.module.causal.register_forward_pre_hook(
        partial(_clamp_positions, last), with_kwargs=True
    )
    with clamped, own_distribution(engine.module.causal):
        out = engine.module.model.generate(
            input_ids=tokens.to(engine.device),
            attention_mask=mask.to(engine.device),
            **inputs_of(answers, engine.module.causal, engine.device),
            pad_token_id=pad,
            eos_token_id=list(ends) or None,
            max_new_tokens=max(one.room for one in answers),
            stopping_criteria=criteria,
            do_sample=False,
            use_cache=True,
            # With it, transformers grows the mask of a rank that has ended without new tokens,
            # which fails without a key-value cache; `AllRanksEnded` replaces it.
            synced_gpus=False,
            **options,
        )
    written: list[list[int]] = out[:, tokens.shape[1] :].tolist()
    return written


class Drawing(LogitsProcessor):
    """Draws each row's token and leaves it as the only one that `generate` can choose."""

    def __init__(self, seeds: Tensor, limits: Limits, never: int | None = None) -> None:
        """`never` is a token that is not drawn."""
        self._seeds, self._limits, self._never = seeds, limits, never
        self.logprobs: list[Tensor] = []
        """The log-probability of each row's token [rows], of one token after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, V] -> [rows, V]."""
        if self._never is not None:
            scores[:, self._never] = -torch.inf
        steps = torch.full_like(self._seeds, len(self.logprobs))
        drawn, logprobs = draw(
            scores, self._seeds, steps, temperature=self._limits.temperature,
            tokens=self._limits.tokens,
        )  # fmt: skip
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)


class RowsFull(StoppingCriteria):
    """True for each row that has `sizes` [rows] tokens, padding included."""

    def __init__(self, sizes: Tensor) -> None:
        self._sizes = sizes

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """input_ids [rows, T] -> [rows], bool."""
        return self._sizes <= input_ids.shape[1]


class AllRanksEnded(StoppingCriteria):
    """True once every row of every rank has met one of `criteria`; until then rows that have ended
    continue, so that all ranks run the same number of forwards."""

    def __init__(
        self, num_rows: int, criteria: StoppingCriteriaList, mesh: Mesh, device: torch.device
    ) -> None:
        self._criteria = criteria
        self._running = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._mesh = mesh

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """input_ids [rows, T] -> [rows], bool, all alike. Collective."""
        self._running &= ~self._criteria(input_ids, scores)
        running = self._mesh.shards.max(self._running.max())
        return (running == 0).expand(len(input_ids))


@contextmanager
def own_distribution(causal: Any) -> Iterator[None]:
    """Set aside how a model's folder wants it to generate, such as penalties, forced tokens and
    stop texts, so that the model's own distribution is sampled."""
    own = causal.generation_config
    causal.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = own


def _clamp_positions(last: int, module: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """Keep the positions of rows that have ended, which continue with the others, in the table."""
    if options.get("position_ids") is not None:
        options["position_ids"] = options["position_ids"].clamp(max=last)
    return inputs, options
