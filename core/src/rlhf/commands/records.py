"""The records of core's commands, without what only some of them need: start-up time."""

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from rlhf.launch.signals import STOPPED
from rlhf.plugin import CommandPlugin, positive

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


def plan_arguments(parser: ArgumentParser) -> None:
    """Add the options that say which hardware to plan for."""
    text = "accelerators of all hosts; default: --nproc, else those of this machine"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)
    text = "memory of each; default: that of this machine's"
    parser.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help=text)
    text = "print the plan as JSON, in bytes"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


def export_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the folder and the role."""
    parser.add_argument("source", metavar="CHECKPOINT")
    parser.add_argument("output", metavar="OUTPUT", help="a new folder")
    text = "the trained model to write, of a run with several; default: policy"
    parser.add_argument("--role", default="policy", help=text)


def doctor_arguments(parser: ArgumentParser) -> None:
    """Add the option for JSON."""
    text = "print the findings as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


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
inspect = CommandPlugin(
    help="show the rows as the model sees them",
    run="rlhf.commands.inspect:inspect_command",
    takes="run",
)
plan = CommandPlugin(
    help="estimate the device memory of a step, for each ZeRO stage and offload",
    run="rlhf.commands.plan:plan_command",
    arguments=plan_arguments,
    takes="run",
)
export = CommandPlugin(
    help="write a model folder from RUN/checkpoints/step-N, or from RUN",
    run="rlhf.commands.records:export_command",
    arguments=export_arguments,
)
doctor = CommandPlugin(
    help="check this machine: what is missing and the remedy; exit 2 if no run can start",
    run="rlhf.commands.doctor:doctor_command",
    arguments=doctor_arguments,
)
