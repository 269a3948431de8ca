"""Answers sampled from a live engine, on any number of ranks and at every ZeRO stage."""

from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rlhf.data.layout import groups_by_length
from rlhf.engine import Engine, Mesh
from rlhf.model.tokenizer import end_tokens
from rlhf.model.weights import quiet_transformers
from rlhf.reference.run_models import RunModels
from rlhf.trainer import Sample

PLAIN = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "use_cache": True,
    "synced_gpus": False,
}
"""Overrides of a model's own generation config, so that its plain distribution is sampled.
`synced_gpus` is False since transformers then grows the mask of a rank that has ended without new
tokens, which fails without a key-value cache; `AllRanksEnded` replaces it."""


def sample(
    run: RunModels,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
) -> list[Sample]:
    """Return an answer to each prompt, drawn from the engine's own distribution, including the
    token that ends it (EOS, or the last token of a trained turn) if it was reached.

    Every rank passes the same prompts and gets all answers. Prompts of similar length run together,
    as many as fit into `batch.tokens`, and the groups are distributed over the ranks. Each answer
    has its own random generator, so it depends only on its prompt and its seed, up to rounding.
    Collective.
    """
    ends, mesh, tokens = end_tokens(run.tokenizer), run.mesh, run.config.batch.budget
    groups = groups_by_length([len(prompt) + max_new_tokens for prompt in prompts], tokens)
    own: dict[int, Sample] = {}
    for first in range(0, len(groups), mesh.shards.size):
        # At stage 3 every forward gathers weights: a rank without a group repeats the last one.
        group = groups[min(first + mesh.shards.rank, len(groups) - 1)]
        noise = Noise([seeds[place] for place in group], temperature, engine.device)
        answers = _continued(
            run, engine, [prompts[place] for place in group], ends,
            max_new_tokens=max_new_tokens, logits_processor=LogitsProcessorList([noise]), **PLAIN,
        )  # fmt: skip
        logprobs = torch.stack(noise.logprobs, 1).tolist()
        for place, answer, known in zip(group, answers, logprobs, strict=True):
            last = next((n for n, token in enumerate(answer) if token in ends), len(answer))
            own[place] = Sample(answer[: last + 1], known[: last + 1])
    answered = ChainMap(*mesh.shards.gather(own))
    return [answered[place] for place in range(len(prompts))]


class Noise(LogitsProcessor):
    """Gumbel noise on each row's logits from its own generator: the most likely token is then a
    draw from the softmax at `temperature`. At temperature 0 there is no noise."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self._temperature = temperature
        self.logprobs: list[Tensor] = []
        """The log-probability of each row's token [rows], of one token after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, V] -> [rows, V], float32."""
        logits = scores.float() / (self._temperature or 1.0)
        noisy = logits
        if self._temperature:
            noise = torch.empty_like(logits)
            for row, generator in zip(noise, self._generators, strict=True):
                row.exponential_(generator=generator)
            noisy = logits - noise.log_()
        drawn = noisy.argmax(-1, keepdim=True)
        self.logprobs.append(logits.gather(-1, drawn).squeeze(-1) - logits.logsumexp(-1))
        return noisy


class AllRanksEnded(StoppingCriteria):
    """True once every row of every rank has written one of `ends`; until then rows that have ended
    continue, so that all ranks run the same number of forwards."""

    def __init__(
        self, num_rows: int, ends: Sequence[int], mesh: Mesh, device: torch.device
    ) -> None:
        self._ends = torch.tensor(ends, device=device)
        self._running = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._mesh = mesh

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """input_ids [rows, T] -> [rows], bool, all alike. Collective."""
        self._running &= ~torch.isin(input_ids[:, -1], self._ends)
        running = self._mesh.shards.max(self._running.max())
        return (running == 0).expand(len(input_ids))


def _continued(
    run: RunModels,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    **options: Any,
) -> list[list[int]]:
    """Return what the engine's model writes after each prompt, up to the longest answer."""
    mesh, tokenizer = run.mesh, run.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows = [torch.tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    if engine.stage == 3 and mesh.shards.size > 1:
        ended = AllRanksEnded(len(rows), ends, mesh, engine.device)
        options["stopping_criteria"] = StoppingCriteriaList([ended])
        # A rank must not stop by itself: each forward gathers weights from all ranks.
        ends = ()
    generating = run.hooks.generation_context(engine=engine)
    with torch.no_grad(), quiet_transformers(), generating:
        out = engine.module.model.generate(
            input_ids=tokens.to(engine.device),
            attention_mask=mask.to(engine.device),
            pad_token_id=pad,
            eos_token_id=list(ends) or None,
            **options,
        )
    answers: list[list[int]] = out[:, tokens.shape[1] :].tolist()
    return answers
