"""The answers of a rollout as trees: what is trained on, and their values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf.trainer import Answer, Example, with_answers
from rlhf_plugin_ppo.advantages import Matrix, gae, token_rewards, whitened
from rlhf_plugin_ppo.config import PPOConfig
from rlhf_rollouts.judged import Judged
from rlhf_rollouts.trees import blank_rollout
from rlhf_rollouts.written import answer_of, shortened

OF_TOKENS = ("drawn", "old", "values", "advantages", "returns")
"""Values of each token: log-probabilities when it was drawn and when the answers were written, the
critic's value then, advantage and return."""


def scores_of(judged: Judged, config: PPOConfig) -> Matrix:
    """Return the reward of each answer [answers], with the penalty of those that were cut; nan
    without a score."""
    scores = judged.total
    if config.reward_clip is not None:
        scores = scores.clip(-config.reward_clip, config.reward_clip)
    return (scores - config.missing_eos_penalty * ~judged.finished).reshape(-1)


def estimates(
    judged: Judged, values: Matrix, log_ratios: Matrix, config: PPOConfig, beta: float
) -> dict[str, Matrix]:
    """Return `advantages` and `returns` of the tokens [answers, T] from the critic's values and the
    log-ratios to the reference; nan for answers without a score, which count nowhere."""
    scores = scores_of(judged, config)
    values = np.where(np.isnan(scores)[:, None], np.nan, values)
    rewards = token_rewards(scores, np.where(np.isnan(values), np.nan, log_ratios), beta)
    if config.whiten_rewards:
        rewards = whitened(rewards, shift=False)
    advantages = gae(rewards, values, gamma=config.gamma, lambda_=config.lambda_)
    returns = advantages + values
    if config.whiten_advantages:
        advantages = whitened(advantages)
    return {"advantages": advantages, "returns": returns}


def trees(
    examples: Sequence[Example],
    judged: Judged,
    known: Mapping[str, Matrix],
    kl: NDArray[np.float64],
) -> list[Example]:
    """Return what the loss sees of the groups, one tree for each of `examples`.

    `known` has the values of the tokens [answers, T] except `drawn`, and `kl` the log-ratio of each
    answer to the reference [answers]. An answer without a score is not trained on.
    """
    made = []
    pairs = zip(examples, judged.groups, judged.values(), strict=True)
    for number, (example, group, values) in enumerate(pairs):
        places = range(number * len(group), (number + 1) * len(group))
        scored = values["scored"]
        answers = [
            answer_of(sample, trained=bool(score))
            for sample, score in zip(group, scored, strict=True)
        ]
        rows: dict[str, Any] = {"drawn": [sample.logprobs for sample in group]}
        for name, matrix in known.items():
            pairs_of = zip(places, group, strict=True)
            rows[name] = [matrix[place, : len(sample.tokens)] for place, sample in pairs_of]
        of_answers = {**values, "kl": np.where(scored, kl[places.start : places.stop], 0.0)}
        made.append(with_answers(example, answers, of_answers | rows))
    return made


def held_out_trees(examples: Sequence[Example], judged: Judged) -> list[Example]:
    """Return answers that are only scored: one token of each stands for it."""
    made = []
    for example, group, values in zip(examples, judged.groups, judged.values(), strict=True):
        answers = [Answer(sample.tokens[:1], [False]) for sample in group]
        blank: dict[str, Any] = {name: [[0.0]] * len(group) for name in OF_TOKENS}
        blank |= {"kl": [0.0] * len(group)}
        made.append(with_answers(shortened(example), answers, values | blank))
    return made


def blank_tree(
    config: PPOConfig, prompts: NDArray[np.int64], names: Sequence[str], *, most: int
) -> Example:
    """Return a tree as large as any of a rollout, and with a path as long as any, for prompts of
    these lengths and paths of up to `most` tokens. `names` are those of the rewards."""
    examples, judged = blank_rollout(config, prompts, names, most=most)
    shape = (config.answers, judged.lengths.max())
    known = {name: np.zeros(shape) for name in OF_TOKENS[1:]}
    (made,) = trees(examples, judged, known, np.zeros(config.answers))
    return made
