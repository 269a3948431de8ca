"""The record of `rlhf inspect`."""

from rlhf.plugin import CommandPlugin

plugin = CommandPlugin(
    help="show the rows as the model sees them",
    run="rlhf.commands.inspection:inspect_command",
    takes="run",
)
