"""The extension `new_name`: the learning rate stays at its peak and falls in the last part of the
run (warm-up, stable, decay). This module has its record and imports no torch."""

from attrs import field, frozen, validators

from rlhf.plugin import ExtensionPlugin


@frozen(kw_only=True)
class NewNameConfig:
    """The settings of the extension."""

    decay: float = field(default=0.2, validator=[validators.gt(0), validators.le(1)])
    """Share of the steps in which the rate falls."""


plugin = ExtensionPlugin(config=NewNameConfig, hooks="rlhf_extension_new_name.schedule:NewName")
