"""Answers from a live engine, safe on every rank at every stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from rlhf.engine import Engine, Mesh
from rlhf.model.save import end_tokens
from rlhf.registry.gateway import BackendGateway

PLAIN = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
}
"""Against what a model's own generation config asks for: its distribution is wanted as it is."""


def generate(
    engine: Engine,
    prompts: list[list[int]],
    hooks: BackendGateway,
    tokenizer: Any,
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """Greedy answers to `prompts` (token ids), without the prompt and without the token that ends
    an answer. Collective."""
    ends = end_tokens(tokenizer)
    answers = _continued(
        engine, prompts, hooks, tokenizer, ends, max_new_tokens=max_new_tokens, do_sample=False
    )
    return [answer[: _length(answer, ends)] for answer in answers]


def sample(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    hooks: BackendGateway,
    mesh: Mesh,
    tokenizer: Any,
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    tokens: int,
) -> list[list[int]]:
    """Answers drawn from the engine's own distribution, with the token that ends an answer (EOS, or
    the trained turn's last) where they reached it.

    Every rank gives the same prompts and gets all answers. Prompts of like length run together, as
    many as fit into `tokens`; the groups are dealt out over the ranks. Each answer has a random
    generator of its own, so it depends on its prompt and its seed alone, but for rounding.
    Collective.
    """
    ends = end_tokens(tokenizer)
    groups = grouped([len(prompt) for prompt in prompts], max_new_tokens, tokens)
    own: dict[int, list[int]] = {}
    for first in range(0, len(groups), mesh.world):
        # At stage 3 every call gathers weights: a rank without a group of its own runs along.
        group = groups[min(first + mesh.rank, len(groups) - 1)]
        noise = Noise([seeds[place] for place in group], temperature, engine.device)
        answers = _continued(
            engine, [prompts[place] for place in group], hooks, tokenizer, ends,
            max_new_tokens=max_new_tokens, logits_processor=LogitsProcessorList([noise]), **PLAIN,
        )  # fmt: skip
        own |= {
            place: answer[: _length(answer, ends) + 1]
            for place, answer in zip(group, answers, strict=True)
        }
    shares = mesh.gather(own)
    return [
        next(share[place] for share in shares if place in share) for place in range(len(prompts))
    ]


def grouped(lengths: Sequence[int], max_new_tokens: int, tokens: int) -> list[list[int]]:
    """Places of prompts that run together: alike in length, padded no more than `tokens` in all,
    at least one."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        longest = lengths[groups[-1][0]] + max_new_tokens if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


class Noise(LogitsProcessor):
    """Gumbel noise on the logits of each row from a generator of its own: the likeliest token is
    then a draw from the softmax at `temperature`."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, V] -> [rows, V], float32."""
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() / self._temperature - noise.log()


def _continued(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    hooks: BackendGateway,
    tokenizer: Any,
    ends: Sequence[int],
    **options: Any,
) -> list[list[int]]:
    """What the engine's model writes after each prompt, padded at the end."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows = [torch.tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    with torch.no_grad(), hooks.generation_context(engine=engine) as keywords:
        out = engine.module.model.generate(
            input_ids=tokens.to(engine.device),
            attention_mask=mask.to(engine.device),
            pad_token_id=pad,
            eos_token_id=list(ends) or None,
            **options,
            **keywords,
        )
    answers: list[list[int]] = out[:, tokens.shape[1] :].tolist()
    return answers


def _length(answer: list[int], ends: Sequence[int]) -> int:
    """Tokens before the first that ends the answer."""
    return next((place for place, token in enumerate(answer) if token in ends), len(answer))
