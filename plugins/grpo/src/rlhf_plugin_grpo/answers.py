"""The answers of a rollout as trees: where they end, what is trained on, and their values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlhf.trainer import Answer, Example, Sample
from rlhf_plugin_grpo.advantages import Rewards, advantages, alike, deviations, overlong
from rlhf_plugin_grpo.config import GRPOConfig
from rlhf_rollouts.rewards import Scores

Group = Sequence[Sample]


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
    return Sample(tokens[:low], sample.logprobs[:low], finished=True)


@frozen(kw_only=True)
class Judged:
    """The answers of a rollout with their rewards, as [groups, answers]; nan where there is no
    score."""

    groups: Sequence[Group]
    by_name: Mapping[str, Rewards]
    total: Rewards
    """The weighted sum."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores) -> "Judged":
        """Return the answers with the scores of all of them, in the order of the groups."""
        shape = (len(groups), len(groups[0]))
        by_name = {name: np.reshape(each, shape) for name, each in scores.by_name.items()}
        return cls(groups=groups, by_name=by_name, total=np.reshape(scores.total, shape))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each answer."""
        return np.array([[len(sample.tokens) for sample in group] for group in self.groups])

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Whether each answer has ended before it was cut."""
        return np.array([[sample.finished for sample in group] for group in self.groups])

    def shaped(self, config: GRPOConfig, log_ratios: Rewards | None = None) -> Rewards:
        """Return the rewards from which advantages are computed: the total, with the penalties on
        length and on the `log_ratios` of the answers to the reference."""
        rewards, method = self.total, config.method
        if method.truncated == "soft":
            rewards = rewards + overlong(self.lengths, config.max_new_tokens)
        if log_ratios is not None:
            rewards = rewards - method.kl_beta * log_ratios
        return rewards

    def kept(self, config: GRPOConfig, shaped: Rewards) -> NDArray[np.bool_]:
        """Return which answers are trained on."""
        kept = ~np.isnan(shaped)
        if config.method.truncated == "mask":
            kept &= self.finished
        if config.method.filter == "zero_variance":
            # Penalties differ with the lengths of answers that are equally right.
            kept &= ~alike(self.total)[:, None]
        return kept

    def values(self) -> list[dict[str, Any]]:
        """Return what metrics need of each group, by name: all of it per answer, so that core can
        divide a group that is larger than `batch.tokens`."""
        lengths, finished = self.lengths, self.finished.astype(float)
        scored = {"": self.total, **{f"/{name}": each for name, each in self.by_name.items()}}
        spread, same = deviations(self.total), alike(self.total).astype(float)
        return [
            {
                "reward_std": np.full_like(lengths[place], spread[place], np.float64),
                "same_reward": np.full_like(lengths[place], same[place], np.float64),
                "length": lengths[place].astype(float),
                "finished": finished[place],
                "finished_length": lengths[place] * finished[place],
                **{f"reward{name}": np.nan_to_num(each[place]) for name, each in scored.items()},
                **{
                    f"scored{name}": (~np.isnan(each[place])).astype(float)
                    for name, each in scored.items()
                },
            }
            for place in range(len(self.groups))
        ]


def plain_trees(examples: Sequence[Example], groups: Sequence[Group]) -> list[Example]:
    """Return the answers to each prompt as a tree without values."""
    return [
        Example(example.prompt, [Answer(sample.tokens) for sample in group])
        for example, group in zip(examples, groups, strict=True)
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
    shaped, method = judged.shaped(config, log_ratios), config.method
    gains = advantages(shaped, method.advantage, method.scale)
    kept, made = judged.kept(config, shaped) & trained, []
    for place, (example, values) in enumerate(zip(examples, judged.values(), strict=True)):
        known = {"drawn": [sample.logprobs for sample in judged.groups[place]]}
        if old is not None:
            known["old"] = list(old[place])
        values |= {"advantage": gains[place], "kept": kept[place].astype(float)}
        answers = [
            Answer(sample.tokens, None if counts else [False] * len(sample.tokens))
            for sample, counts in zip(judged.groups[place], kept[place], strict=True)
        ]
        prompt = example.prompt
        if not kept[place].any():
            prompt, answers = prompt[-1:], [Answer(each.tokens[:1], [False]) for each in answers]
            known = {name: [row[:1] for row in rows] for name, rows in known.items()}
        made.append(attrs.evolve(example, prompt=prompt, answers=answers, values=values | known))
    return made


def blank_tree(config: GRPOConfig, prompts: NDArray[np.int64], *, most: int) -> Example:
    """Return a tree as large as any of a rollout, and with a path as long as any, for prompts of
    these lengths and paths of up to `most` tokens."""
    count = config.answers
    room = np.clip(most - prompts, 1, config.max_new_tokens)
    largest = int((prompts + count * room).argmax())
    prompt, size = int(prompts[largest]), int(room[largest])
    sizes = [int((prompts + room).max()) - prompt, *[size] * (count - 1)]
    zeros = np.zeros((1, count))
    judged = Judged(
        groups=[[Sample([0] * each, [0.0] * each) for each in sizes]],
        by_name={spec.label: zeros for spec in config.rewards},
        total=np.arange(count, dtype=np.float64)[None],
    )
    old = [[[0.0] * each for each in sizes]] if config.off_policy else None
    (made,) = trees([Example([0] * prompt, [])], judged, config, old=old)
    return attrs.evolve(made, prompt=[0] * prompt, answers=[Answer([0] * each) for each in sizes])
