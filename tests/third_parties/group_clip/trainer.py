"""PPO-clip (arXiv 1707.06347 eq. 7): the advantage of an answer is its reward minus the mean reward
of the answers to the same prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf.trainer import Loss, PackedBatch, Term
from rlhf_rollouts.on_policy import Judged, OnPolicyTrainer
from rlhf_rollouts.ratios import clipped_gains, corrections


class GroupClip(OnPolicyTrainer):
    section = "group_clip"

    def values(self, judged: Judged) -> Sequence[Mapping[str, Any]]:
        # Without a score the reward is nan, and the answer is not trained on.
        advantages = np.nan_to_num(judged.total - judged.means)
        return [{"advantage": of_group} for of_group in advantages]

    def loss(self, batch: PackedBatch) -> Loss:
        config = self.config
        old, drawn = (batch.values[name][batch.predict_at] for name in ("old", "drawn"))
        advantages = batch.values["advantage"][batch.answer]
        ratio = (self.logprobs(batch) - old).exp()
        gains = clipped_gains(ratio, advantages, low=config.clip, high=config.clip)
        weights = corrections(old, drawn, config.correction, batch.answer, batch.num_answers)
        losses = Term((-gains * weights).sum(), per="tokens")
        return Loss((losses,), self.rollout_metrics(batch))
