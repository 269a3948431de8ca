"""The probability of each step from an exported model, in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from rlhf.errors import RLHFError
from rlhf.readouts import exported_model
from rlhf.trainer import encode_steps
from rlhf_plugin_prm.losses import log_odds


class Scorer:
    """The process reward model in the model folder or adapter folder of a run.

    Steps are marked as in training.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        self.config = process_config(folder)
        by_token = self.config.prm_formulation == "token"
        self.labels = self.config.prm_reward_tokens if by_token else [0, 1]
        model = exported_model(Path(folder), "causal" if by_token else "token", dtype=dtype)
        self.model = model.to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def probabilities(self, prompt: Any, steps: Sequence[str]) -> list[float]:
        """Return the probability of each step to be right, after a `prompt` of text or messages."""
        row = encode_steps(
            self.tokenizer,
            prompt,
            steps,
            separator=self.config.prm_separator,
            placeholder=self.config.prm_placeholder,
        )
        tokens = [*row.prompt, *row.answers[0].tokens]
        ids = torch.tensor([tokens], device=self.model.device)
        logits = self.model(input_ids=ids).logits[0].float()
        places = [len(row.prompt) + end for end in row.columns["ends"]]
        probabilities: list[float] = log_odds(logits[places][:, self.labels]).sigmoid().tolist()
        return probabilities


def process_config(folder: str | Path) -> Any:
    """Return the config.json of a process reward model. Raises RLHFError for any other folder."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):
        config = None
    if not hasattr(config, "prm_formulation"):
        raise RLHFError(
            f"{folder} has no config.json of a process reward model; pass the model/ folder of a "
            "run of `rlhf run prm`"
        )
    return config
