"""The command `rlhf`: parses the command line and turns errors into exit codes."""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Never

from rlhf.commands.parsing import positive
from rlhf.errors import RanksFailed, RLHFError, SameOnAllRanks, first_line, place_of
from rlhf.launch.signals import PROBLEMS

WORDS = "[CONFIG.yaml] [--section.field VALUE ...]"
SETTINGS = """\
settings:
  CONFIG.yaml             sections and fields as `rlhf config NAME` prints them
  --section.field VALUE   one field; VALUE is YAML; hyphens may replace underscores
  --section VALUE         the section's first field: --model PATH, --data FILE, --lora 16
  --nproc N               processes on this machine; default: one per device
  --resume [step-N]       continue from the newest checkpoint of --output, or from that one
  --overwrite             replace the run in --output

`rlhf run NAME --help` lists all settings of that trainer, `rlhf plugins` lists the trainers.
Without model and data, the trainer's own demo runs."""
TRAINER_COMMANDS = {
    "run": "train: rlhf run sft --model Qwen/Qwen3-0.6B --data chats.jsonl",
    "config": "print every setting with its value, as YAML",
    "inspect": "show the rows as the model sees them",
    "plan": "estimate the device memory of a step, for each ZeRO stage and offload",
    "verify": "check in two steps that layout and resume keep the curve; exit 1 if not",
}
FOLDER_COMMANDS = {
    "export": ("CHECKPOINT", "write a model folder from RUN/checkpoints/step-N, or from RUN"),
    "merge": ("ADAPTER", "merge a LoRA adapter into its base model"),
}
AS_JSON: dict[str, Any] = {"dest": "as_json", "action": "store_true"}
CLOSED_PIPE = 141
"""128 + SIGPIPE: the reader of the output has ended, as `head` does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 for success, 2 for an error that the user can fix, 130 after Ctrl-C,
    141 if the output has no reader any more. A defect raises, which Python turns into 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_current_folder()
        options = _parser(words).parse_args(words)
        code = _act(options, words)
        sys.stdout.flush()
        return code
    except RLHFError as error:
        if os.environ.get("RANK", "0") == "0" or not isinstance(error, SameOnAllRanks):
            _print_error(str(error))
        return 2
    except RanksFailed as failure:
        return failure.code
    except KeyboardInterrupt:
        if "RLHF_PARENT" not in os.environ:  # Else the launcher prints it once for all ranks.
            advice = "; --resume continues from the last checkpoint, if there is one"
            advice *= words[:1] == ["run"]
            print(f"error: interrupted{advice}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        # Python writes the rest of the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        if place := place_of(error):
            _print_error(f"{place}: {type(error).__name__}: {first_line(error)}")
        raise


def _print_error(text: str) -> None:
    """Print an error of this rank, and tell it to the process that has started the ranks."""
    rank = os.environ.get("RANK", "0")
    where = f" on rank {rank}" * (rank != "0")
    print(f"error{where}: {text}", file=sys.stderr, flush=True)
    if PROBLEMS in os.environ:
        os.write(int(os.environ[PROBLEMS]), f"{text}\n".encode())


def _check_current_folder() -> None:
    """Raise RLHFError if the current folder has been deleted, where libraries end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        text = "the current folder no longer exists; change to another"
        raise RLHFError(text) from None


def _output_is_closed() -> bool:
    """Return whether the reader of standard output has ended."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> Never:
        raise RLHFError(f"{message}; see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> Never:
        sys.stdout.flush()  # Here, so that `main` sees a closed pipe.
        super().exit(status, message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata  # late: start-up time

        print(f"rlhf-core {metadata.version('rlhf-core')}")
        parser.exit()


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    text = "Post-training with pluggable workflows and backends."
    parser = _Parser(prog="rlhf", description=text)
    absent = argparse.SUPPRESS
    text = "print rlhf-core's version"
    parser.add_argument("--version", action=_Version, nargs=0, default=absent, help=text)
    # DeepSpeed's launcher passes it to every rank; LOCAL_RANK in the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=absent, help=absent)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_trainer_commands(commands)
    command = commands.add_parser("plugins", help="list installed plugins without importing them")
    text = "load each plugin; exit 2 if one is broken"
    command.add_argument("check", nargs="?", choices=["check"], help=text)
    command.add_argument("--json", **AS_JSON, help="print the list as JSON")
    text = "check this machine: what is missing and the remedy; exit 2 if no run can start"
    command = commands.add_parser("doctor", help=text, description=text)
    command.add_argument("--json", **AS_JSON, help="print the findings as JSON")
    for name, (source, text) in FOLDER_COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", metavar=source)
        command.add_argument("output", metavar="OUTPUT", help="a new folder")
        if name == "export":
            text = "the trained model to write, of a run with several; default: policy"
            command.add_argument("--role", default="policy", help=text)
    _add_recorded(commands)
    _add_new(commands)
    _add_migrate(commands)
    _add_serve(commands)
    text = "print or start a job over several hosts: slurm, hostfile or kubernetes"
    command = commands.add_parser("launch", help=text, description=text)
    if argv[:1] == ["launch"]:
        from rlhf.commands.launch import add_kinds  # late: start-up time

        add_kinds(command, WORDS)
    return parser


def _add_trainer_commands(commands: Any) -> None:
    """Add the commands that read a configuration."""
    for name, text in TRAINER_COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=SETTINGS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"rlhf {name} NAME {WORDS}",
        )
        if name == "plan":
            _add_hardware(command)
        command.add_argument("name", metavar="NAME", help="the trainer, or FILE.py:CLASS")
        words = command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        words.required = False


def _add_recorded(commands: Any) -> None:
    """Add the commands that read run folders."""
    text = "write an HTML page that compares runs: curves, evaluation, memory, settings"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("runs", metavar="RUN", nargs="+", help="a run folder")
    command.add_argument("--output", default="report.html", help="the page; default: report.html")
    text = "upload the model of a run to a hub: weights, tokenizer, config and card only"
    command = commands.add_parser("push", help=text, description=text)
    command.add_argument("run", metavar="RUN", help="a run folder, or a model folder")
    command.add_argument("name", metavar="NAME", help="the repository, as in OWNER/MODEL")
    command.add_argument("--private", action="store_true", help="create it as a private one")
    text = "list the runs in a folder: step, state, loss, last evaluation"
    command = commands.add_parser("runs", help=text, description=text)
    command.add_argument("folder", nargs="?", default="runs", help="default: runs")
    command.add_argument("--json", **AS_JSON, help="print the list as JSON")


def _add_new(commands: Any) -> None:
    """Add the command that writes a plugin."""
    text = "write a small working plugin with its tests, as a starting point"
    command = commands.add_parser("new", help=text, description=text)
    command.add_argument("kind", choices=["trainer", "backend", "observer", "extension"])
    command.add_argument("name", metavar="NAME", help="its name, such as my_trainer")
    text = "write one file with a trainer into the current folder"
    command.add_argument("--here", action="store_true", help=text)


def _add_migrate(commands: Any) -> None:
    """Add the command that reads files of other projects."""
    text = "convert a configuration of TRL, Axolotl, LLaMA-Factory or OpenRLHF"
    command = commands.add_parser("migrate", help=text, description=text)
    command.add_argument("source", metavar="FILE", help="YAML, JSON or a shell script")
    text = "the file to write; default: standard output"
    command.add_argument("-o", "--output", metavar="FILE", help=text)
    text = "trl, axolotl, llamafactory or openrlhf, with a trainer as in trl/dpo; default: detected"
    command.add_argument("--from", dest="chosen", metavar="PROJECT", help=text)
    text = "devices that it was run on, a factor of batch.size; default: as its launcher says"
    command.add_argument("--gpus", type=positive(int), metavar="N", help=text)


def _add_serve(commands: Any) -> None:
    """Add `rlhf serve`."""
    text = "serve an exported reward model over HTTP, or compare a server with it"
    usage = "rlhf serve [options] MODEL, or rlhf serve --check URL MODEL DATA"
    command = commands.add_parser("serve", help=text, description=text, usage=usage)
    command.add_argument("model", metavar="MODEL", help="a run of rm or prm, or a model folder")
    command.add_argument("data", metavar="DATA", nargs="?", help="rows to send with --check")
    text = "send rows to this URL and print the largest difference; exit 1 if it is large"
    command.add_argument("--check", metavar="URL", help=text)
    text = "the address to listen at; default: 127.0.0.1, which only this machine reaches"
    command.add_argument("--host", default="127.0.0.1", help=text)
    text = "default: 8000; 0 takes a free one"
    command.add_argument("--port", type=int, default=8000, help=text)
    text = "what clients must send; none: nothing; default: RLHF_TOKEN, else a new one is printed"
    command.add_argument("--token", help=text)
    text = "tokens of a forward pass, and of the longest prompt with an answer; default: 8192"
    command.add_argument("--max-tokens", type=positive(int), default=8192, metavar="N", help=text)
    text = "requests that may wait; more are refused with 503; default: 256"
    command.add_argument("--queue", type=positive(int), default=256, metavar="N", help=text)
    command.add_argument("--device", help="such as cpu or cuda:1; default: cuda if there is one")
    dtypes = ("auto", "fp32", "bf16", "fp16")
    text = "auto, the default, is that of the folder"
    command.add_argument("--dtype", choices=dtypes, default="auto", help=text)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rlhf plan`, which may also come after the trainer's name."""
    text = "accelerators of all hosts; default: --nproc, else those of this machine"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)
    text = "memory of each; default: that of this machine's"
    parser.add_argument("--gpu-memory", type=positive(float), metavar="GIB", help=text)
    parser.add_argument("--json", **AS_JSON, help="print the plan as JSON, in bytes")


def _act(options: argparse.Namespace, argv: list[str]) -> int:
    """Call the function NAME_command of a command's file, which is imported only now for start-up
    time, with the options of its parser."""
    if {"-h", "--help"} & set(vars(options).get("words", ())):
        print(f"usage: rlhf {options.command} {options.name} {WORDS}\n\n{SETTINGS}\n")
        options = argparse.Namespace(command="config", name=options.name, words=[])
    if options.command == "plan":
        hardware = _Parser(prog="rlhf plan", add_help=False)
        _add_hardware(hardware)
        _, options.words = hardware.parse_known_args(options.words, options)
    arguments = vars(options)
    arguments.pop("local_rank", None)
    name = arguments.pop("command")
    act = getattr(import_module(f"rlhf.commands.{name}"), f"{name}_command")
    if "words" not in arguments:
        return int(act(**arguments))
    from rlhf.request.reader import read_config

    trainer, words = arguments.pop("name"), arguments.pop("words")
    argv = ["run", trainer, *words] if name == "launch" else argv
    request = read_config(trainer, overrides=words, inputs=name != "config", argv=argv)
    return int(act(request, **arguments))
