"""Records of commands whose files import much."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, positive


def launch_arguments(parser: ArgumentParser) -> None:
    from rlhf.commands.launch import add_kinds  # late: start-up time

    add_kinds(parser)


def report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    parser.add_argument("--output", default="report.html", help="the page; default: report.html")


def push_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a model folder")
    parser.add_argument("name", metavar="NAME", help="the repository, as in OWNER/MODEL")
    parser.add_argument("--private", action="store_true", help="create it as a private one")


def runs_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help="default: runs")
    text = "print the list as JSON"
    parser.add_argument("--json", dest="as_json", action="store_true", help=text)


def migrate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help="YAML, JSON or a shell script")
    text = "the file to write; default: standard output"
    parser.add_argument("-o", "--output", metavar="FILE", help=text)
    text = "trl, axolotl, llamafactory or openrlhf, with a trainer as in trl/dpo; default: detected"
    parser.add_argument("--from", dest="chosen", metavar="PROJECT", help=text)
    text = "devices that it was run on, a factor of batch.size; default: as its launcher says"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)


def serve_arguments(parser: ArgumentParser) -> None:
    parser.usage = "rlhf serve [options] MODEL, or rlhf serve --check URL MODEL DATA"
    parser.add_argument("model", metavar="MODEL", help="a run of rm or prm, or a model folder")
    parser.add_argument("data", metavar="DATA", nargs="?", help="rows to send with --check")
    text = "send rows to this URL and print the largest difference; exit 1 if it is large"
    parser.add_argument("--check", metavar="URL", help=text)
    text = "the address to listen at; default: 127.0.0.1, which only this machine reaches"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "default: 8000; 0 takes a free one"
    parser.add_argument("--port", type=int, default=8000, help=text)
    text = "what clients must send; none: nothing; default: RLHF_TOKEN, else a new one is printed"
    parser.add_argument("--token", help=text)
    text = "tokens of a forward pass, and of the longest prompt with an answer; default: 8192"
    parser.add_argument("--max-tokens", type=positive(int), default=8192, metavar="N", help=text)
    text = "requests that may wait; more are refused with 503; default: 256"
    parser.add_argument("--queue", type=positive(int), default=256, metavar="N", help=text)
    parser.add_argument("--device", help="such as cpu or cuda:1; default: cuda if there is one")
    dtypes = ("auto", "fp32", "bf16", "fp16")
    text = "auto, the default, is that of the folder"
    parser.add_argument("--dtype", choices=dtypes, default="auto", help=text)


launch = CommandPlugin(
    help="print or start a job over several hosts: slurm, hostfile or kubernetes",
    run="rlhf.commands.launch:launch_command",
    arguments=launch_arguments,
    takes="run",
)
report = CommandPlugin(
    help="write an HTML page that compares runs: curves, evaluation, memory, settings",
    run="rlhf.commands.report:report_command",
    arguments=report_arguments,
)
push = CommandPlugin(
    help="upload the model of a run to a hub: weights, tokenizer, config and card only",
    run="rlhf.commands.push:push_command",
    arguments=push_arguments,
)
runs = CommandPlugin(
    help="list the runs in a folder: step, state, loss, last evaluation",
    run="rlhf.commands.runs:runs_command",
    arguments=runs_arguments,
)
migrate = CommandPlugin(
    help="convert a configuration of TRL, Axolotl, LLaMA-Factory or OpenRLHF",
    run="rlhf.commands.migrate:migrate_command",
    arguments=migrate_arguments,
)
serve = CommandPlugin(
    help="serve an exported reward model over HTTP, or compare a server with it",
    run="rlhf.commands.serve:serve_command",
    arguments=serve_arguments,
)
