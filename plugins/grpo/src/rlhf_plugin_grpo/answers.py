"""The answers of a rollout as trees: what is trained on, and their values."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from rlhf.trainer import Answer, Example, with_answers
from rlhf_plugin_grpo.advantages import (
    Rewards,
    advantages,
    alike,
    decoupled,
    deviations,
    overlong,
)
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.trees import blank_rollout
from rlhf_rollouts.written import answer_of, shortened


def gains_of(judged: Judged, config: GRPOConfig, log_ratios: Rewards | None = None) -> Rewards:
    """Return the advantages of the answers, with the penalties on length and on the `log_ratios` of
    the answers to the reference."""
    method, penalty = config.method, np.zeros_like(judged.total)
    if method.truncated == "soft":
        penalty = overlong(judged.lengths, config.max_new_tokens)
    if method.aggregation == "normalize_then_sum":
        # The penalty is a further reward with the weight 1, as it is for users of TRL.
        rewards = [*judged.weighted, (1.0, np.where(np.isnan(judged.total), np.nan, penalty))]
        return decoupled(rewards, method.advantage, method.scale)
    if log_ratios is not None:
        penalty = penalty - method.kl_beta * log_ratios
    return advantages(judged.total + penalty, method.advantage, method.scale)


def same_rewards(judged: Judged, config: GRPOConfig) -> NDArray[np.bool_]:
    """Return whether the answers of a group have equal rewards [groups], before penalties, which
    differ with the lengths of answers that are equally right."""
    if config.method.aggregation == "normalize_then_sum":
        same = np.ones(len(judged.total), dtype=bool)
        return np.logical_and.reduce([same, *(alike(each) for _, each in judged.weighted)])
    return alike(judged.total)


def kept_of(judged: Judged, config: GRPOConfig) -> NDArray[np.bool_]:
    """Return which answers are trained on."""
    kept = ~np.isnan(judged.total)
    if config.method.truncated == "mask":
        kept &= judged.finished
    if config.method.filter == "zero_variance":
        kept &= ~same_rewards(judged, config)[:, None]
    return kept


def values_of(judged: Judged, config: GRPOConfig) -> list[dict[str, Any]]:
    """Return what metrics need of each group, by name."""
    spread, same = deviations(judged.total), same_rewards(judged, config).astype(float)
    return [
        {
            "reward_std": np.full(len(values["length"]), spread[place]),
            "same_reward": np.full(len(values["length"]), same[place]),
            **values,
        }
        for place, values in enumerate(judged.values())
    ]


def trees(
    examples: Sequence[Example],
    judged: Judged,
    config: GRPOConfig,
    *,
    trained: bool = True,
    old: Sequence[Sequence[Any]] | None = None,
    log_ratios: Rewards | None = None,
) -> list[Example]:
    """Return what the loss sees of the groups, one tree for each of `examples`.

    With `trained` False no answer is trained on, as in evaluations.

    `old` are the log-probabilities of the policy for each answer, if it moves before the loss sees
    them. A group of which no answer is trained on has no effect on the loss: one token of each
    answer stands for it, and its values still count in the metrics.
    """
    gains = gains_of(judged, config, log_ratios)
    kept, made = kept_of(judged, config) & trained, []
    kl = np.zeros_like(gains) if log_ratios is None else log_ratios
    kl = np.where(np.isnan(judged.total), 0.0, kl)
    known_values = values_of(judged, config)
    for place, (example, values) in enumerate(zip(examples, known_values, strict=True)):
        known = {"drawn": [sample.logprobs for sample in judged.groups[place]]}
        if old is not None:
            known["old"] = list(old[place])
        values |= {"advantage": gains[place], "kept": kept[place].astype(float), "kl": kl[place]}
        answers = [
            answer_of(sample, trained=bool(counts))
            for sample, counts in zip(judged.groups[place], kept[place], strict=True)
        ]
        if not kept[place].any():
            answers = [Answer(each.tokens[:1], [False]) for each in answers]
            known = {name: [row[:1] for row in rows] for name, rows in known.items()}
            example = shortened(example)
        made.append(with_answers(example, answers, values | known))
    return made


def blank_tree(
    config: GRPOConfig, prompts: NDArray[np.int64], names: Sequence[str], *, most: int
) -> Example:
    """Return a tree as large as any of a rollout, and with a path as long as any, for prompts of
    these lengths and paths of up to `most` tokens. `names` are those of the rewards."""
    (example,), judged = blank_rollout(config, prompts, names, most=most)
    sizes = [len(sample.tokens) for sample in judged.groups[0]]
    old = [[[0.0] * each for each in sizes]] if config.off_policy else None
    (made,) = trees([example], judged, config, old=old)
    answers = [Answer([0] * each) for each in sizes]
    return attrs.evolve(made, prompt=example.prompt, answers=answers)
