"""The records of core's commands, without what only some of them need: start-up time."""

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from rlhf.launch.signals import STOPPED
from rlhf.plugin import CommandPlugin

if TYPE_CHECKING:  # Start-up time.
    from rlhf.request.reader import Request


def run_command(request: "Request") -> int:
    """Train; returns the exit code 0, or 143 if a signal stopped the run."""
    from rlhf.api import start  # late: start-up time

    _, ended = start(request)
    return STOPPED if ended == "signal" else 0


def export_command(source: str, output: str, role: str = "policy") -> int:
    """Write the model of `role` to `output` from a checkpoint, or from the newest one of a run
    folder; returns 0."""
    from rlhf.api import export  # late: start-up time

    checkpoint = export(source, output, role=role)
    print(f"exported {checkpoint} to {output}")
    return 0


def export_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the folder and the role."""
    parser.add_argument("source", metavar="CHECKPOINT")
    parser.add_argument("output", metavar="OUTPUT", help="a new folder")
    text = "the trained model to write, of a run with several; default: policy"
    parser.add_argument("--role", default="policy", help=text)


run = CommandPlugin(
    help="train: rlhf run sft --model Qwen/Qwen3-0.6B --data chats.jsonl",
    run="rlhf.commands.records:run_command",
    takes="run",
)
config = CommandPlugin(
    help="print every setting with its value, as YAML",
    run="rlhf.commands.config:config_command",
    takes="settings",
)
export = CommandPlugin(
    help="write a model folder from RUN/checkpoints/step-N, or from RUN",
    run="rlhf.commands.records:export_command",
    arguments=export_arguments,
)
