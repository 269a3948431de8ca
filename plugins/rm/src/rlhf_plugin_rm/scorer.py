"""Rewards from an exported model, in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rlhf.errors import RLHFError
from rlhf.readouts import exported_model
from rlhf.trainer import encode


class Scorer:
    """The reward model in the model folder or adapter folder of a run.

    Texts and messages are tokenised as in training. Each answer is scored without padding.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        self.folder = folder
        model = exported_model(Path(folder), "sequence", dtype=dtype)
        self.config, self.model = model.config, model.to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def rewards(
        self, prompt: Any, answers: Sequence[Any], *, normalise: bool | None = None
    ) -> list[float]:
        """Return the reward of each of the `answers` to the `prompt`: texts, or lists of messages.

        With `normalise` (default: `rm.normalise` of the run) the rewards have the mean 0 and the
        deviation 1 on the run's held-out rows. Raises RLHFError if the run had none.
        """
        rows = [encode(self.tokenizer, prompt, answer, renders_whole=True) for answer in answers]
        rewards = [self._reward([*row.prompt, *row.answers[0].tokens]) for row in rows]
        if normalise is None:
            normalise = getattr(self.config, "reward_normalise", False)
        if not normalise:
            return rewards
        mean = getattr(self.config, "reward_mean", None)
        if mean is None:
            raise RLHFError(
                f"{self.folder} has no reward_mean in its config.json, because its run had no "
                "held-out rows; set data.eval in the run, or pass normalise=False"
            )
        deviation = self.config.reward_std
        return [(reward - mean) / max(deviation, 1e-8) for reward in rewards]

    @torch.no_grad()
    def _reward(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens], device=self.model.device)
        return float(self.model(input_ids=ids).logits)
