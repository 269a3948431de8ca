"""`rlhf export`: write a model folder from a checkpoint."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the folder and the role."""
    parser.add_argument("source", metavar="CHECKPOINT")
    parser.add_argument("output", metavar="OUTPUT", help="a new folder")
    text = "the trained model to write, of a run with several; default: policy"
    parser.add_argument("--role", default="policy", help=text)


plugin = CommandPlugin(
    help="write a model folder from RUN/checkpoints/step-N, or from RUN",
    run="rlhf.commands.export:export_command",
    arguments=add_arguments,
)


def export_command(source: str, output: str, role: str = "policy") -> int:
    """Write the model of `role` to `output` from a checkpoint, or from the newest one of a run
    folder; returns 0."""
    from rlhf.api import export  # late: start-up time

    checkpoint = export(source, output, role=role)
    print(f"exported {checkpoint} to {output}")
    return 0
