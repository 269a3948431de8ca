"""A probability per step from an exported model, in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from peft import PeftConfig, PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rlhf.data.formats import RawRow, Reader, format_of
from rlhf_plugin_prm.losses import log_odds


@frozen
class Marks:
    """How steps are marked, as the stepwise format asks for it."""

    separator: str
    placeholder: str | None


class Scorer:
    """The model folder of a run, or its adapter folder. Steps are marked as in training."""

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        self.config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        marks = Marks(self.config.prm_separator, self.config.prm_placeholder)
        self.reader = Reader(tokenizer, marks)
        by_token = self.config.prm_formulation == "token"
        kind = AutoModelForCausalLM if by_token else AutoModelForTokenClassification
        self.labels = self.config.prm_reward_tokens if by_token else [0, 1]
        adapted = (Path(folder) / "adapter_config.json").is_file()
        path = PeftConfig.from_pretrained(folder).base_model_name_or_path if adapted else folder
        model = kind.from_pretrained(path, config=self.config, dtype=dtype)
        model = PeftModel.from_pretrained(model, folder) if adapted else model
        self.model = model.to(device).eval()

    @torch.no_grad()
    def probabilities(self, prompt: Any, steps: Sequence[str]) -> list[float]:
        """The probability that each of the `steps` after the `prompt` (text or messages) is
        right."""
        columns = {"prompt": prompt, "completions": list(steps), "labels": [None] * len(steps)}
        raw = RawRow("the prompt given", columns)
        ((row,),) = format_of("stepwise")([raw], self.reader)
        tokens = [*row.prompt, *row.answers[0].tokens]
        ids = torch.tensor([tokens], device=self.model.device)
        logits = self.model(input_ids=ids).logits[0].float()
        places = [len(row.prompt) + end for end in row.columns["ends"]]
        found: list[float] = log_odds(logits[places][:, self.labels]).sigmoid().tolist()
        return found
