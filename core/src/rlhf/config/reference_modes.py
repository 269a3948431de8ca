"""Which modes of a reference a configuration can have, checked before anything loads."""

from typing import Literal

from rlhf.config.sections import Config
from rlhf.errors import RLHFError

ReferenceMode = Literal["auto", "adapter", "engine", "cache"]
"""adapter: the policy with its adapter off; engine: a frozen second model; cache: log-probabilities
computed once and kept on disk; auto: the cheapest that the configuration allows."""


def check_reference(
    config: Config, mode: str, *, every: int | None = None, live: bool = False
) -> None:
    """Raise RLHFError if this configuration cannot have this mode of a reference.

    `auto` chooses a possible mode, so it fails only where the reference has to be an engine: if it
    moves every `every` steps. `live` says that the trainer needs more than log-probabilities of the
    answers in the rows.
    """
    if mode == "auto" and every is None:
        return
    mode = "engine" if mode == "auto" else mode
    name, setting = config.trainer_name, f"{config.trainer_name}.reference {mode}"
    has_adapter = config.lora is not None or config.model.adapter is not None
    if mode == "adapter" and config.model.adapter is not None:
        raise RLHFError(
            f"{setting} would be the base model without model.adapter {config.model.adapter}, "
            "which is not where the policy starts; choose engine or cache"
        )
    if mode == "adapter" and config.lora is None:
        raise RLHFError(f"{setting} needs lora; choose engine or cache, or add --lora 16")
    if mode == "engine" and config.model.quantize is not None:
        raise RLHFError(
            f"{setting} cannot be combined with model.quantize; choose adapter or cache"
        )
    if mode == "cache" and live:
        raise RLHFError(
            f"{setting} has log-probabilities of the rows' own answers only, and {name} needs "
            "more; choose adapter or engine"
        )
    if every is not None and has_adapter:
        raise RLHFError(
            f"{name}: a reference that moves follows all weights of the policy; remove the adapter"
        )
    if every is not None and mode != "engine":
        raise RLHFError(f"{name}: a reference that moves cannot be of mode {mode}; choose engine")
