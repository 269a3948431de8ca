"""The answers of a rollout: a group of them to each prompt."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from rlhf.engine import Engine
from rlhf.errors import SameOnAllRanks
from rlhf.trainer import (
    Answer,
    Example,
    Run,
    Sample,
    answer_seeds,
    prompt_inputs,
    with_answers,
)

__all__ = [
    "answer_of", "draws_of", "first_turns", "plain_trees", "sampled", "shortened", "spans_of",
    "stopped", "turn_seed", "written",
]  # fmt: skip

Group = Sequence[Sample]
STRIDE = 0x5851F42D4C957F2D
"""The distance of the seeds of two turns, far larger than that of two answers."""
MOST_TURNS = 1000
"""Turns of an answer whose seeds are known again."""


def written(
    run: Run,
    engine: Engine,
    examples: Sequence[Example],
    seeds: Sequence[int],
    *,
    answers: int,
    max_new_tokens: int,
    temperature: float,
    stop: str | None = None,
) -> list[list[Sample]]:
    """Return `answers` answers of the engine to the prompt of each example. With `stop` an answer
    ends with the token that completes the first match of this regular expression. Collective."""
    drawn = sampled(
        run, engine, max_new_tokens=max_new_tokens, temperature=temperature,
        **draws_of(examples, seeds, answers),
    )  # fmt: skip
    if stop is not None:
        pattern = re.compile(stop)
        drawn = [stopped(sample, pattern, run.tokenizer) for sample in drawn]
    return [drawn[start : start + answers] for start in range(0, len(drawn), answers)]


def sampled(run: Run, engine: Engine, **how: Any) -> list[Sample]:
    """Return `run.sample(engine, **how)`. Raises RLHFError for log-probabilities that are nan,
    which tokens have that nothing predicts. Collective."""
    drawn = run.sample(engine, **how)
    if any(np.isnan(sample.logprobs).any() for sample in drawn):
        raise SameOnAllRanks(
            "the engine wrote tokens with the log-probability nan; check its weights and dtype"
        )
    return drawn


def draws_of(examples: Sequence[Example], seeds: Sequence[int], answers: int) -> dict[str, Any]:
    """Return the prompts, inputs and seeds of `answers` answers to the prompt of each example, as
    `Run.sample` gets them."""
    repeated = [example for example in examples for _ in range(answers)]
    return {
        "prompts": [example.prompt for example in repeated],
        "seeds": answer_seeds(seeds, answers),
        "inputs": [prompt_inputs(example) for example in repeated],
    }


def stopped(sample: Sample, pattern: re.Pattern[str], tokenizer: Any) -> Sample:
    """Return the answer up to the token that completes the first match of the pattern."""
    tokens = list(sample.tokens)

    def matches(size: int) -> bool:
        text = tokenizer.decode(tokens[:size], skip_special_tokens=True)
        return pattern.search(text) is not None

    if not matches(len(tokens)):
        return sample
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if matches(middle) else (middle + 1, high)
    logprobs = sample.logprobs[:low]
    return attrs.evolve(sample, tokens=tokens[:low], logprobs=logprobs, finished=True)


def plain_trees(examples: Sequence[Example], groups: Sequence[Group]) -> list[Example]:
    """Return the answers to each prompt as a tree without values."""
    return [
        with_answers(example, [answer_of(sample) for sample in group])
        for example, group in zip(examples, groups, strict=True)
    ]


def shortened(example: Example) -> Example:
    """Return an example of which nothing is trained on with the last token of its prompt, which
    stands for it; with images, whose tokens belong together, with all of it."""
    return example if example.inputs else attrs.evolve(example, prompt=example.prompt[-1:])


def answer_of(sample: Sample, *, trained: bool = True) -> Answer:
    """Return an answer, of which the loss predicts what the policy wrote, or nothing."""
    if not trained:
        return Answer(sample.tokens, [False] * len(sample.tokens))
    own = ~np.isnan(sample.logprobs)
    return Answer(sample.tokens, None if own.all() else own.tolist())


def spans_of(logprobs: Any) -> list[tuple[int, int]]:
    """Return start and end of each turn of the policy in an answer; the log-probabilities between
    them are nan."""
    own = (~np.isnan(np.asarray(logprobs, np.float64))).astype(np.int8)
    edges = np.flatnonzero(np.diff(own, prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn (from 0) of the answer with this seed; both have 63 bits."""
    return (seed + turn * STRIDE) % 2**63


def first_turns(seed: int) -> Iterator[tuple[int, int]]:
    """Yield what the seed of a turn may be: the turn's number and the seed of its answer."""
    return ((turn, (seed - turn * STRIDE) % 2**63) for turn in range(MOST_TURNS))
