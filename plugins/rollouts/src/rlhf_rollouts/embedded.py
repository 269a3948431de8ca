"""Answers that a run's own model writes, on any number of ranks, also with sharded weights."""

from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
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
from rlhf.hookspecs import BackendHooks
from rlhf.plugin import Config
from rlhf.rollouts import groups_by_length, quiet_transformers
from rlhf.trainer import Sample


@frozen(kw_only=True, eq=False)
class Embedded:
    """The model of the run writes the answers itself, by transformers' `generate`.

    Prompts of similar length run together, as many as fit into `batch.tokens`, and the groups are
    distributed over the ranks. Each answer has its own random generator.
    """

    config: Config
    tokenizer: Any
    mesh: Mesh
    hooks: BackendHooks

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        max_new_tokens: int,
        max_tokens: int,
        ends: Sequence[int],
        temperature: float,
    ) -> list[Sample]:
        """See `rlhf.rollouts.RolloutEngine`."""
        shards, tokens = self.mesh.shards, self.config.batch.budget
        rooms = [max(1, min(max_new_tokens, max_tokens - len(prompt))) for prompt in prompts]
        groups = groups_by_length([len(prompt) + max_new_tokens for prompt in prompts], tokens)
        own: dict[int, Sample] = {}
        for first in range(0, len(groups), shards.size):
            # Every forward may gather weights: a rank without a group repeats the last one.
            group = groups[min(first + shards.rank, len(groups) - 1)]
            noise = Noise(
                [seeds[place] for place in group], temperature, engine.device,
                tokens=engine.module.tokens,
            )  # fmt: skip
            answers = self._continued(
                engine, [prompts[place] for place in group],
                rooms=[rooms[place] for place in group], ends=ends,
                max_new_tokens=max_new_tokens, logits_processor=LogitsProcessorList([noise]),
            )  # fmt: skip
            logprobs = torch.stack(noise.logprobs, 1).tolist()
            for place, answer, known in zip(group, answers, logprobs, strict=True):
                answer = answer[: rooms[place]]
                size = next((n for n, token in enumerate(answer, 1) if token in ends), len(answer))
                own[place] = Sample(answer[:size], known[:size], finished=answer[size - 1] in ends)
        answered = ChainMap(*shards.gather(own))
        return [answered[place] for place in range(len(prompts))]

    def _continued(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        rooms: Sequence[int],
        ends: Sequence[int],
        **options: Any,
    ) -> list[list[int]]:
        """Return what the engine's model writes after each prompt, until every answer has ended. An
        answer ends with one of `ends`, or when it has as many tokens as its number in `rooms`. The
        caller cuts off what follows."""
        shards, pad = self.mesh.shards, self.tokenizer.pad_token_id
        if pad is None:
            pad = self.tokenizer.eos_token_id
        rows = [torch.tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
        tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
        )
        sizes = torch.tensor(rooms, device=engine.device) + tokens.shape[1]
        criteria = StoppingCriteriaList([RowsFull(sizes)])
        if engine.sharded and shards.size > 1:
            criteria.append(EosTokenCriteria(list(ends)))
            together = AllRanksEnded(len(rows), criteria, self.mesh, engine.device)
            criteria = StoppingCriteriaList([together])
            # A rank must not stop by itself: each forward gathers weights from all ranks.
            ends = ()
        # The last token of a row is not read.
        last = max(len(prompt) + room for prompt, room in zip(prompts, rooms, strict=True)) - 2
        clamped = engine.module.causal.register_forward_pre_hook(
            partial(_clamp_positions, last), with_kwargs=True
        )
        generating = self.hooks.generation_context(engine=engine)
        plain = own_distribution(engine.module.causal)
        with torch.no_grad(), quiet_transformers(), generating, clamped, plain:
            out = engine.module.model.generate(
                input_ids=tokens.to(engine.device),
                attention_mask=mask.to(engine.device),
                pad_token_id=pad,
                eos_token_id=list(ends) or None,
                stopping_criteria=criteria,
                do_sample=False,
                use_cache=True,
                # With it, transformers grows the mask of a rank that has ended without new tokens,
                # which fails without a key-value cache; `AllRanksEnded` replaces it.
                synced_gpus=False,
                **options,
            )
        answers: list[list[int]] = out[:, tokens.shape[1] :].tolist()
        return answers


class Noise(LogitsProcessor):
    """Gumbel noise on each row's logits from its own generator: the most likely token is then a
    draw from the softmax at `temperature`. At temperature 0 no noise is added. Only the first
    `tokens` are drawn."""

    def __init__(
        self,
        seeds: Sequence[int],
        temperature: float,
        device: torch.device,
        *,
        tokens: int | None = None,
    ) -> None:
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self._temperature, self._tokens = temperature, tokens
        self.logprobs: list[Tensor] = []
        """The log-probability of each row's token [rows], of one token after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, V] -> [rows, V], or fewer tokens, float32."""
        logits = scores[:, : self._tokens].float() / (self._temperature or 1.0)
        noisy = logits
        if self._temperature:
            noise = torch.empty_like(logits)
            for row, generator in zip(noise, self._generators, strict=True):
                row.exponential_(generator=generator)
            noisy = logits - noise.log_()
        drawn = noisy.argmax(-1, keepdim=True)
        self.logprobs.append(logits.gather(-1, drawn).squeeze(-1) - logits.logsumexp(-1))
        return noisy


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
