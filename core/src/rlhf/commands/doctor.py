"""The record of `rlhf doctor` and its options."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin


def add_arguments(parser: ArgumentParser) -> None:
    """Add the option for JSON."""
    text = "print the findings as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


plugin = CommandPlugin(
    help="check this machine: what is missing and the remedy; exit 2 if no run can start",
    run="rlhf.commands.diagnosis:doctor_command",
    arguments=add_arguments,
)
