"""The observer `wandb`. This module has its record and settings, and does not import wandb."""

from typing import Literal

from attrs import frozen

from rlhf.plugin import ObserverPlugin


@frozen(kw_only=True)
class WandbConfig:
    """Weights & Biases. It reads the key from WANDB_API_KEY, or from where `wandb login` put it."""

    project: str = "rlhf"
    """Project in which the run appears."""
    entity: str | None = None
    """User or team of the project; default: that of the key."""
    group: str | None = None
    """Group of runs that are shown together."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: write only to the run folder, for `wandb sync`. Default: WANDB_MODE, else online."""


plugin = ObserverPlugin(config=WandbConfig, hooks="rlhf_observer_wandb.observer:Wandb")
