"""Rewards from an exported model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import scorer
from rlhf.errors import RLHFError
from rlhf.trainer import Row
from rlhf_rows import encode


class Scorer(scorer.Scorer):
    """The reward model in the model folder or adapter folder of a run.

    Texts and messages are tokenised as in training. A reward is read at the last token of its
    answer.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        super().__init__(folder, task="sequence", device=device, dtype=dtype)

    def encode(self, prompt: Any, answers: Sequence[Any]) -> Row:
        """Return the prompt and its answers as token ids; `ends` are the answers' last tokens."""
        row = encode(
            self.tokenizer, prompt, *answers, renders_whole=True, images=self.images
        )  # fmt: skip
        ends = [[len(answer.tokens) - 1] for answer in row.answers]
        return Row(row.prompt, row.answers, {"ends": ends}, row.images)

    def scores(self, logits: Tensor) -> list[float]:
        """Return the reward, normalised if `rm.normalise` of the run says so."""
        return self._normalised(logits[:, 0], None)

    def rewards(
        self, prompt: Any, answers: Sequence[Any], *, normalise: bool | None = None
    ) -> list[float]:
        """Return the reward of each of the `answers` to the `prompt`: texts, or lists of messages.

        With `normalise` (default: `rm.normalise` of the run) the rewards have the mean 0 and the
        deviation 1 on the run's held-out rows. Raises RLHFError if the run had none.
        """
        return self._normalised(torch.cat(self.read(prompt, answers))[:, 0], normalise)

    def _normalised(self, rewards: Tensor, normalise: bool | None) -> list[float]:
        if normalise is None:
            normalise = getattr(self.config, "reward_normalise", False)
        if normalise:
            mean = getattr(self.config, "reward_mean", None)
            if mean is None:
                raise RLHFError(
                    f"{self.folder} has no reward_mean in its config.json, because its run had no "
                    "held-out rows; set data.eval in the run, or pass normalise=False"
                )
            rewards = (rewards - mean) / max(self.config.reward_std, 1e-8)
        found: list[float] = rewards.tolist()
        return found
