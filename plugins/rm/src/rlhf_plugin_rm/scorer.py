"""Rewards from an exported model, in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.data.formats import RawRow, Reader, format_of
from rlhf.errors import RLHFError


class Scorer:
    """The model folder of a run, or its adapter folder.

    Texts and messages are tokenised as in training. Each answer is scored by itself, so nothing
    pads it.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.config = AutoConfig.from_pretrained(folder)
        adapted = (Path(folder) / "adapter_config.json").is_file()
        path = PeftConfig.from_pretrained(folder).base_model_name_or_path if adapted else folder
        model = AutoModelForSequenceClassification.from_pretrained(
            path, config=self.config, dtype=dtype
        )
        model = PeftModel.from_pretrained(model, folder) if adapted else model
        self.model = model.to(device).eval()

    def rewards(
        self, prompt: Any, answers: Sequence[Any], *, normalise: bool | None = None
    ) -> list[float]:
        """The reward of each of the `answers` to the `prompt`: texts, or lists of messages.

        With `normalise` (default: as the run was told by `rm.normalise`) less the mean and over the
        deviation of the run's held-out rows; RLHFError where it had none.
        """
        raw = [
            RawRow(f"answer {number}", {"prompt": prompt, "completion": answer, "label": True})
            for number, answer in enumerate(answers)
        ]
        rows = format_of("unpaired")(raw, Reader(self.tokenizer))
        found = [self._reward([*row.prompt, *row.answers[0].tokens]) for (row,) in rows]
        asked = getattr(self.config, "reward_normalise", False) if normalise is None else normalise
        if not asked:
            return found
        mean = getattr(self.config, "reward_mean", None)
        if mean is None:
            raise RLHFError(
                f"{self.folder} has no reward_mean in its config.json, since its run had no "
                "held-out rows: set data.eval there, or ask with normalise=False"
            )
        deviation = self.config.reward_std
        return [(reward - mean) / max(deviation, 1e-8) for reward in found]

    @torch.no_grad()
    def _reward(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens], device=self.model.device)
        return float(self.model(input_ids=ids).logits)
