"""Which kinds of reference a configuration can have; told before anything loads."""

from rlhf.config.sections import Config
from rlhf.errors import RLHFError


def check_reference(
    config: Config, mode: str, *, every: int | None = None, live: bool = False
) -> None:
    """For a trainer's `check`: raise for a mode that is asked for and cannot be had. `auto` finds
    one that can, but for a reference that moves `every` so many steps, which is an engine."""
    if mode != "auto" or every is not None:
        check_mode(config, "engine" if mode == "auto" else mode, every=every, live=live)


def check_mode(config: Config, mode: str, *, every: int | None, live: bool) -> None:
    """Raise for a mode that this configuration cannot have."""
    setting = f"{config.trainer_name}.reference {mode}"
    adapted = config.lora is not None or config.model.adapter is not None
    if mode == "adapter" and config.model.adapter is not None:
        raise RLHFError(
            f"{setting} would be the base without model.adapter {config.model.adapter}, which is "
            "not where the policy starts: choose engine or cache"
        )
    if mode == "adapter" and config.lora is None:
        raise RLHFError(f"{setting} needs lora: choose engine or cache, or add --lora 16")
    if mode == "engine" and config.model.quantize is not None:
        raise RLHFError(f"{setting} does not go with model.quantize: choose adapter or cache")
    if mode == "cache" and live:
        raise RLHFError(
            f"{setting} has log-probabilities of the data's own answers alone, and "
            f"{config.trainer_name} asks about others: choose adapter or engine"
        )
    if every is not None and (mode != "engine" or adapted):
        raise RLHFError(
            f"{config.trainer_name}: a reference that moves is an engine of its own and follows "
            f"all weights, but here is {'an adapter' if adapted else f'the mode {mode}'}: "
            f"{'take the adapter out' if adapted else 'choose engine'}"
        )
