"""The section `sft`."""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class SFTConfig:
    """Supervised fine-tuning."""

    train_on: Literal["answers", "everything"] = "answers"
    """answers: the assistant's turns or the completion. everything: also the prompt's tokens."""
