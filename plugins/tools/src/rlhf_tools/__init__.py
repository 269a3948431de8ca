"""Records and arguments of the commands before and after runs, and the record of the model card."""

from argparse import REMAINDER, ArgumentParser
from pathlib import Path

from rlhf.plugin import CommandPlugin, ExportPlugin, positive

PORT = 29500
"""torchrun's default for the port of the rendezvous."""


def plan_arguments(parser: ArgumentParser) -> None:
    """Add the options that say which hardware to plan for."""
    text = "accelerators of all hosts; default: --nproc, else those of this machine"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)
    text = "memory of each; default: that of this machine's"
    parser.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help=text)
    text = "print the plan as JSON, in bytes"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


def cache_arguments(parser: ArgumentParser) -> None:
    """Add the option that removes what is old, and that for JSON."""
    either = parser.add_mutually_exclusive_group()
    text = "remove what no run has used for so many days"
    either.add_argument("--prune", type=positive(float), metavar="DAYS", help=text)
    text = "print the list as JSON"
    either.add_argument("--json", dest="as_json", action="store_true", help=text)


def doctor_arguments(parser: ArgumentParser) -> None:
    """Add the option for JSON, and the configuration whose generation engine is checked."""
    parser.usage = "rlhf doctor [--json] [NAME [CONFIG.yaml] [--section.field VALUE ...]]"
    text = "print the findings as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)
    text = "a trainer, its YAML file and settings: check what their generation engine needs"
    parser.add_argument("words", nargs=REMAINDER, metavar="NAME", help=text)


def report_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `rlhf report`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument("--output", default="report.html", help="the page; default: report.html")


def runs_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `rlhf runs`."""
    parser.add_argument("folder", nargs="?", default="runs", help="default: runs")
    text = "print the list as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


def push_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `rlhf push`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or a model folder")
    parser.add_argument("name", metavar="NAME", help="the repository, as in OWNER/MODEL")
    parser.add_argument("--private", action="store_true", help="create it as a private one")


def plugins_arguments(parser: ArgumentParser) -> None:
    """Add `check` and the option for JSON."""
    text = "load each plugin; exit 2 if one is broken"
    parser.add_argument("check", nargs="?", choices=["check"], help=text)
    text = "print the list as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


def launch_arguments(command: ArgumentParser) -> None:
    """Add the parsers of `rlhf launch KIND`."""
    words = "[OPTIONS] NAME [CONFIG.yaml] [--section.field VALUE ...]"
    kinds = command.add_subparsers(metavar="KIND", dest="kind", required=True)
    for kind, text in {
        "slurm": "a batch script that continues the run when its time is up",
        "hostfile": "one command per host, for hosts that share a file system",
        "kubernetes": "a TrainJob for Kubeflow's trainer",
    }.items():
        parser = kinds.add_parser(
            kind, help=text, description=text, usage=f"rlhf launch {kind} {words}"
        )
        if kind == "hostfile":
            parser.add_argument("--hosts", required=True, type=Path, help="lines NAME slots=N")
            parser.add_argument(
                "--port", type=positive(int), default=PORT, help="of the first host"
            )
        else:
            parser.add_argument(
                "--nodes", type=positive(int), required=True, help="number of hosts"
            )
            parser.add_argument(
                "--gpus", type=positive(int), required=True, help="devices of each host"
            )
        if kind == "slurm":
            text = "a further option of sbatch, such as partition=gpu; may be repeated"
            parser.add_argument("--sbatch", action="append", default=[], help=text)
            text = "one more host, on which the server of rollouts.engine runs"
            parser.add_argument("--server-node", action="store_true", help=text)
        if kind == "kubernetes":
            parser.add_argument("--image", required=True, help="container image with rlhf")
            text = "persistent volume claim and where it is mounted, as CLAIM=/path"
            parser.add_argument("--volume", required=True, help=text)
            parser.add_argument("--resource", default="nvidia.com/gpu", help="name of a device")
        start = {"hostfile": "run this host's share"}.get(kind, "submit the job")
        parser.add_argument("--start", action="store_true", help=f"{start} instead of printing it")


cache_plugin = CommandPlugin(
    help="list what runs keep in $RLHF_CACHE or ~/.cache/rlhf, and remove what is old",
    run="rlhf_tools.cache:cache_command",
    arguments=cache_arguments,
)
doctor_plugin = CommandPlugin(
    help="check this machine: what is missing and the remedy; exit 2 if no run can start",
    run="rlhf_tools.doctor:doctor_command",
    arguments=doctor_arguments,
)
inspect_plugin = CommandPlugin(
    help="show the rows as the model sees them",
    run="rlhf_tools.inspect:inspect_command",
    takes="run",
)
plan_plugin = CommandPlugin(
    help="estimate the device memory of a step, for each ZeRO stage and offload",
    run="rlhf_tools.plan:plan_command",
    arguments=plan_arguments,
    takes="run",
)
plugins_plugin = CommandPlugin(
    help="list installed plugins without importing them",
    run="rlhf_tools.plugins:plugins_command",
    arguments=plugins_arguments,
)
report_plugin = CommandPlugin(
    help="write an HTML page that compares runs: curves, evaluation, memory, settings",
    run="rlhf_tools.report:report_command",
    arguments=report_arguments,
)
runs_plugin = CommandPlugin(
    help="list the runs in a folder: step, state, loss, last evaluation",
    run="rlhf_tools.runs:runs_command",
    arguments=runs_arguments,
)
push_plugin = CommandPlugin(
    help="upload the model of a run to a hub: weights, tokenizer, config and card only",
    run="rlhf_tools.push:push_command",
    arguments=push_arguments,
)
launch_plugin = CommandPlugin(
    help="print or start a job over several hosts: slurm, hostfile or kubernetes",
    run="rlhf_tools.launch:launch_command",
    arguments=launch_arguments,
    takes="run",
)
card_plugin = ExportPlugin(write="rlhf_tools.card:write_card")
