"""The answers of a rollout as trees for the loss, and a rollout without content that is as large as
any."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf.trainer import Answer, Example, Sample, with_answers
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.room import largest_group
from rlhf_rollouts.written import answer_of, shortened

__all__ = ["blank_rollout", "held_out_trees", "trained_trees"]

Values = Sequence[Mapping[str, Any]]
"""For each group a number for each answer, by name."""


def trained_trees(
    examples: Sequence[Example], judged: Judged, values: Values, old: Sequence[Sequence[Any]]
) -> list[Example]:
    """Return the groups as trees, one for each of `examples`, without a loss on answers that have
    no score.

    Their values are those of `Judged.values`, `values`, and for each token `drawn` and `old`, its
    log-probabilities when it was drawn and under the policy before it trains on the rollout.
    """
    made = []
    groups = zip(examples, judged.groups, judged.values(), values, old, strict=True)
    for example, group, known, more, logprobs in groups:
        answers = [
            answer_of(sample, trained=bool(scored))
            for sample, scored in zip(group, known["scored"], strict=True)
        ]
        of_tokens = {"drawn": [sample.logprobs for sample in group], "old": list(logprobs)}
        made.append(with_answers(example, answers, {**known, **more, **of_tokens}))
    return made


def held_out_trees(examples: Sequence[Example], judged: Judged, values: Values) -> list[Example]:
    """Return answers that are only scored, with the values of `trained_trees`: one token of each
    stands for it."""
    made = []
    groups = zip(examples, judged.groups, judged.values(), values, strict=True)
    for example, group, known, more in groups:
        answers = [Answer(sample.tokens[:1], [False]) for sample in group]
        of_tokens = {name: [[0.0]] * len(group) for name in ("drawn", "old")}
        made.append(with_answers(shortened(example), answers, {**known, **more, **of_tokens}))
    return made


def blank_rollout(
    config: Any, prompts: NDArray[np.int64], names: Sequence[str], *, most: int
) -> tuple[list[Example], Judged]:
    """Return a prompt and its group, as large as any of a rollout and with a path as long as any,
    for prompts of these lengths and paths of up to `most` tokens. `config` is the trainer's section
    and `names` are those of the rewards, which differ between the answers."""
    prompt, sizes = largest_group(
        prompts, answers=config.answers, max_new_tokens=config.max_new_tokens, most=most
    )
    rewards = np.arange(len(sizes), dtype=np.float64)[None]
    judged = Judged(
        groups=[[Sample([0] * size, [0.0] * size) for size in sizes]],
        by_name=dict.fromkeys(names, rewards),
        total=rewards,
    )
    return [Example([0] * prompt, [])], judged
