"""The record of `rlhf config`."""

from rlhf.plugin import CommandPlugin

plugin = CommandPlugin(
    help="print every setting with its value, as YAML",
    run="rlhf.commands.description:config_command",
    takes="settings",
)
