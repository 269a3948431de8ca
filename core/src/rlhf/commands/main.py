"""The command `rlhf`: starts what its words ask for and turns errors into exit codes."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Never

from rlhf.errors import RLHFError, SameOnAllRanks

WORDS = "[CONFIG.yaml] [--section.field VALUE ...]"
SETTINGS = """\
settings:
  CONFIG.yaml             sections and fields as `rlhf config NAME` prints them
  --section.field VALUE   one field; VALUE is YAML; hyphens may stand for underscores
  --section VALUE         the section's first field: --model PATH, --data FILE, --lora 16
  --nproc N               processes on this machine; default one per device
  --resume [step-N]       go on from the newest checkpoint of --output, or from that one
  --overwrite             replace the run in --output

`rlhf run NAME --help` lists every setting of that trainer, `rlhf plugins` the trainers.
Neither model nor data given: the trainer's own demo."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 for what the user can mend, 130 after a Ctrl-C that nobody waited
    for. A defect raises: 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(words)
        return options.act(options, words) or 0
    except RLHFError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, SameOnAllRanks):
            where = f" on rank {rank}" * (rank != "0")
            print(f"error{where}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if "RLHF_PARENT" not in os.environ:  # Else the launcher of ours that started it says so.
            more = "; --resume goes on from the last checkpoint, if there is one"
            more *= words[:1] == ["run"]
            print(f"error: interrupted{more}", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> Never:
        raise RLHFError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata  # late: start-up time

        print(f"rlhf-core {metadata.version('rlhf-core')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rlhf", description="Post-training with pluggable workflows and backends."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version of rlhf-core"
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, text in (
        ("run", "train: rlhf run sft --model Qwen/Qwen3-0.6B --data chats.jsonl"),
        ("config", "print every setting with its value in force, as YAML"),
        ("inspect", "show the rows as the model sees them"),
    ):
        usage = f"rlhf {name} NAME {WORDS}"
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(
            name, help=text, description=text, epilog=SETTINGS, formatter_class=raw, usage=usage
        )
        command.add_argument("name", metavar="NAME", help="the trainer")
        words = command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        words.required = False
        command.set_defaults(act=_trainer_command)
    command = commands.add_parser("plugins", help="list what is installed, without importing it")
    command.add_argument(
        "check", nargs="?", choices=["check"], help="load each; 2 if one is broken"
    )
    command.add_argument("--json", action="store_true", help="the list as JSON")
    command.set_defaults(act=_plugins)
    for name, source, text in (
        (
            "export",
            "CHECKPOINT",
            "make a model folder of RUN/checkpoints/step-N, or of RUN's newest",
        ),
        ("merge", "ADAPTER", "fold a LoRA adapter into its base model"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", metavar=source)
        command.add_argument("output", metavar="OUTPUT", help="a new folder")
        command.set_defaults(act=_convert)
    return parser


# Each command imports what it needs and no more: start-up time.


def _trainer_command(options: argparse.Namespace, argv: list[str]) -> int:
    from rlhf.request.describe import describe
    from rlhf.request.reader import read_config

    if {"-h", "--help"} & set(options.words):
        print(f"usage: rlhf {options.command} {options.name} {WORDS}\n\n{SETTINGS}\n")
        print(describe(read_config(options.name, inputs=False)), end="")
        return 0
    inputs = options.command != "config"
    request = read_config(options.name, overrides=options.words, inputs=inputs, argv=argv)
    if options.command == "config":
        print(describe(request), end="")
        return 0
    if options.command == "inspect":
        from rlhf.commands.inspect import inspect_command

        return inspect_command(request)
    from rlhf.commands.run import run_command

    return run_command(request)


def _plugins(options: argparse.Namespace, argv: list[str]) -> int:
    from rlhf.commands.plugins import check_plugins, list_plugins

    return check_plugins() if options.check else list_plugins(as_json=options.json)


def _convert(options: argparse.Namespace, argv: list[str]) -> int:
    if options.command == "export":
        from rlhf.commands.export import export_command

        return export_command(options.source, options.output)
    from rlhf.commands.merge import merge_command

    return merge_command(options.source, options.output)
