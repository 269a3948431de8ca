"""`rlhf sweep`: its record and options."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add the learning rates."""
    text = "a learning rate; may be repeated"
    parser.add_argument(
        "--rate", dest="rates", action="append", required=True, type=positive(float), help=text
    )


plugin = CommandPlugin(
    help="train once per learning rate and print the last losses",
    run="rlhf_sweep.command:sweep",
    arguments=add_arguments,
    takes="run",
)
