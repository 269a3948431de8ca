"""What a plugin hands over first: light attrs records that import neither torch nor
transformers."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class TrainerPlugin:
    """A training workflow, found under the entry-point group `rlhf.trainers`.

    The entry point's name is the command (`rlhf run NAME`), the config section and the flag prefix.
    """

    config: type
    """The frozen attrs class of the trainer's own section."""
    trainer: str
    """Import string of the `rlhf.trainer.Trainer` subclass, `module:Class`; imported after the
    config is good."""
    defaults: Mapping[str, Any] = field(factory=dict)
    """Changes of core's defaults for this trainer by dotted name, such as `{"optim.lr": 1e-6}`."""
    demo: str | None = None
    """The YAML of `rlhf run NAME` without model and data: a file beside the trainer's package."""
    report: str | None = None
    """Import string of `report(config, folder)`, run after the demo to show what changed."""
    check: Callable[[Any], None] | None = None
    """`check(config)` raises RLHFError for what a run of this trainer lacks; with model and data,
    before torch is imported."""
    requires: tuple[str, ...] = ()
    """Extra distributions that must be installed for this trainer, named in the error if they are
    not."""


@frozen(kw_only=True)
class BackendPlugin:
    """An implementation of the backend hooks, found under `rlhf.backends`."""

    config: type
    """The frozen attrs class of the backend's own section."""
    hooks: str
    """Import string of the class with the hook implementations, `module:Class`; instantiated
    without arguments."""
    check: Callable[[Any], None] | None = None
    """`check(config)` raises RLHFError for combinations across sections; runs before torch is
    imported."""
