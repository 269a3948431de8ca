"""The probability of each step from an exported model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from rlhf import scorer
from rlhf.errors import RLHFError
from rlhf.trainer import Row
from rlhf_plugin_prm.config import PRMConfig
from rlhf_plugin_prm.losses import log_odds
from rlhf_plugin_prm.stepwise import encode_steps


class Scorer(scorer.Scorer):
    """The process reward model in the model folder or adapter folder of a run.

    Steps are marked as in training. A probability is read at the last token of its step.
    """

    def __init__(self, folder: str | Path, *, device: str = "cpu", dtype: Any = "auto") -> None:
        config = process_config(folder)
        by_token = config["prm_formulation"] == "token"
        super().__init__(
            folder,
            task="causal" if by_token else "token",
            tokens=config["prm_reward_tokens"] if by_token else None,
            device=device,
            dtype=dtype,
        )
        self.marks = PRMConfig(
            separator=config["prm_separator"], placeholder=config["prm_placeholder"]
        )

    def encode(self, prompt: Any, answers: Sequence[Any]) -> Row:
        """Return the prompt and its answers as token ids; an answer is a list of steps, and its
        `ends` are the last tokens of the steps."""
        for number, steps in enumerate(answers):
            if not isinstance(steps, list):
                raise RLHFError(f"answers[{number}] must be a list of steps: {steps!r:.40}")
        rows = [encode_steps(self.tokenizer, prompt, steps, self.marks) for steps in answers]
        ends = [row.columns["ends"] for row in rows]
        return Row(rows[0].prompt, [row.answers[0] for row in rows], {"ends": ends})

    def scores(self, logits: Tensor) -> list[float]:
        """Return the probability of each step to be right."""
        probabilities: list[float] = log_odds(logits).sigmoid().tolist()
        return probabilities

    def probabilities(self, prompt: Any, steps: Sequence[str]) -> list[float]:
        """Return the probability of each step to be right, after a `prompt` of text or messages."""
        return self.scores(self.read(prompt, [steps])[0])


def process_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a process reward model. Raises RLHFError for any other folder."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError):
        config = {}
    if "prm_formulation" not in config:
        raise RLHFError(
            f"{folder} has no config.json of a process reward model; pass the model/ folder of a "
            "run of `rlhf run prm`"
        )
    return config
