"""The record of `rlhf verify`."""

from rlhf.plugin import CommandPlugin

plugin = CommandPlugin(
    help="check in two steps that layout and resume keep the curve; exit 1 if not",
    run="rlhf_devkit.verification:verify_command",
    takes="run",
)
