"""The record of `rlhf plan` and its options."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options that say which hardware to plan for."""
    text = "accelerators of all hosts; default: --nproc, else those of this machine"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)
    text = "memory of each; default: that of this machine's"
    parser.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help=text)
    text = "print the plan as JSON, in bytes"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


plugin = CommandPlugin(
    help="estimate the device memory of a step, for each ZeRO stage and offload",
    run="rlhf.commands.planning:plan_command",
    arguments=add_arguments,
    takes="run",
)
