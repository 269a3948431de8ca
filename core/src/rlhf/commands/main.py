"""The command `rlhf`: turns what a command raises into messages and exit codes."""

import argparse
import io
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Never

from rlhf.errors import RanksFailed, RLHFError, SameOnAllRanks, first_line, place_of
from rlhf.launch.proxies import bypass_proxies
from rlhf.launch.signals import PROBLEMS, REQUEST
from rlhf.plugin import CommandPlugin
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import CORE_COMMANDS, find_command, installed, known_plugins

CLOSED_PIPE = 141
"""128 + SIGPIPE: the reader of the output has ended, as `head` does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 for success, 2 for an error that the user can fix, 130 after Ctrl-C,
    141 if the output has no reader any more. A defect raises, which Python turns into 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    _escape_what_cannot_be_printed()
    try:
        _check_current_folder()
        bypass_proxies()
        code = act(words)
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
            print(f"error: interrupted{advice if words[:1] == ['run'] else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        _discard_output()
        return CLOSED_PIPE
    except OSError as error:
        if not (problem := _refusal_of_output()):
            _print_place(error)
            raise
        _discard_output()
        _print_error(f"cannot write to standard output ({problem}); redirect it elsewhere")
        return 2
    except Exception as error:
        _print_place(error)
        raise


def _print_place(error: Exception) -> None:
    """Print which method of a plugin raised the error and where, if that is known."""
    if place := place_of(error):
        _print_error(f"{place}: {type(error).__name__}: {first_line(error)}")


def _print_error(text: str) -> None:
    """Print an error of this rank, unless our launcher knows it from another rank."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" on rank {rank}"
    if PROBLEMS not in os.environ or _is_first(rank, text):
        print(f"error{where}: {text}", file=sys.stderr, flush=True)


def _is_first(rank: str, text: str) -> bool:
    """Tell our launcher an error; returns whether no other rank has told it the same before."""
    if rank != "0":
        time.sleep(0.5)  # Rank 0 comes first: its line names no rank, and the error may be of all.
    file = int(os.environ[PROBLEMS])
    # The ranks share one position in the file, so none overwrites the line of another.
    os.write(file, f"{rank} {text}\n".encode())
    told = os.pread(file, os.fstat(file).st_size, 0).decode()
    first = re.search(rf"^(\d+) {re.escape(text)}$", told, re.MULTILINE)
    return first is None or first[1] == rank


def _escape_what_cannot_be_printed() -> None:
    """Have standard output escape the characters that the locale's encoding lacks, such as those of
    a sample, as standard error does: they must not end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_current_folder() -> None:
    """Raise RLHFError if the current folder has been deleted, where libraries end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RLHFError("the current folder no longer exists; change to another") from None


def _output_is_closed() -> bool:
    """Return whether the reader of standard output has ended."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _refusal_of_output() -> str:
    """Return why standard output takes nothing, such as a file on a full disk, or ""."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.strerror or ""
    return ""


def _discard_output() -> None:
    """Let what Python writes of the output at exit go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
HELP = {"-h", "--help"}


def act(words: Sequence[str]) -> int:
    """Call the command that `words` name, and return its exit code."""
    name, *words = _Overview().parse_args(words).words
    plugin = find_command(name)
    record: CommandPlugin = load_record(plugin)
    parser = _parser(name, record)
    if record.takes != "nothing" and (trainer := _explained(parser, words)):
        parser.usage = f"rlhf {name} {trainer} {WORDS}"
        parser.print_help()
        print()
        return act(["config", trainer])
    options, rest = parser.parse_known_args(words)
    arguments = vars(options)
    if record.takes == "nothing":
        _raise_if_unexpected(rest)
        return int(load_object(record.run, plugin)(**arguments))
    if not rest:
        parser.error("the following arguments are required: NAME")
    _raise_if_unexpected(rest[:1] if rest[0].startswith("-") else [])
    from rlhf.request.reader import read_config, received  # late: start-up time

    if REQUEST in os.environ:
        request = received(int(os.environ.pop(REQUEST)))
    else:
        request = read_config(
            rest[0], overrides=rest[1:], inputs=record.takes == "run", argv=["run", *rest]
        )
    return int(load_object(record.run, plugin)(request, **arguments))


def _parser(name: str, record: CommandPlugin) -> "_Parser":
    """Return the parser of a command's own options, which may come before or after NAME."""
    parser = _Parser(prog=f"rlhf {name}", description=record.help)
    record.arguments(parser)  # First, since parsers below this one are named after its usage.
    if record.takes != "nothing":
        parser.usage = f"rlhf {name} NAME {WORDS}"
        parser.epilog = f"NAME is a trainer, or FILE.py:CLASS.\n\n{SETTINGS}"
    return parser


def _explained(parser: "_Parser", words: Sequence[str]) -> str | None:
    """Return the trainer whose settings a word such as --help asks for, if there is one."""
    if not HELP & {*words}:
        return None
    try:
        _, rest = parser.parse_known_args([word for word in words if word not in HELP])
    except RLHFError:  # The parser's own help tells what is missing.
        return None
    return next((word for word in rest[:1] if not word.startswith("-")), None)


def _raise_if_unexpected(words: Sequence[str]) -> None:
    if words:
        raise RLHFError(f"unrecognized arguments: {' '.join(words)}; see `rlhf --help`")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=raw, **options)

    def error(self, message: str) -> Never:
        raise RLHFError(f"{message}; see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> Never:
        sys.stdout.flush()  # Here, so that `main` sees a closed pipe.
        super().exit(status, message)


class _Overview(_Parser):
    """The parser of what comes before the command; its help lists all commands."""

    def __init__(self) -> None:
        text = "Post-training with pluggable workflows and backends."
        super().__init__(prog="rlhf", usage="rlhf [-h] [--version] COMMAND ...", description=text)
        absent = argparse.SUPPRESS
        text = "print rlhf-core's version"
        self.add_argument("--version", action=_Version, nargs=0, default=absent, help=text)
        # DeepSpeed's launcher passes it to every rank; LOCAL_RANK in the environment says the same.
        self.add_argument("--local_rank", "--local-rank", type=int, default=absent, help=absent)
        self.add_argument("words", nargs=argparse.PARSER, metavar="COMMAND", help=absent)

    def format_help(self) -> str:
        self.epilog = "\n".join(_overview())
        return super().format_help()


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"rlhf-core {metadata.version('rlhf-core')}")
        parser.exit()


def _overview() -> Iterator[str]:
    """Yield the lines that list commands: core's with their help, those of other distributions as
    their metadata say, and those of ours that are not installed."""
    others = [row for row in installed() if row.kind == "command"]
    names = {row.name for row in others}
    missing = {
        name: package for name, package in known_plugins("command").items() if name not in names
    }
    yield "commands:"
    for name in CORE_COMMANDS:
        yield f"  {name:10} {load_record(find_command(name)).help}"
    for distribution in dict.fromkeys(row.distribution for row in others):
        rows = [row for row in others if row.distribution == distribution]
        yield f"\n{distribution}: {rows[0].summary}"
        yield from (f"  {row.name:10} {row.problem or ''}".rstrip() for row in rows)
    if missing:
        yield "\nnot installed:"
        yield from (f"  {name:10} pip install {package}" for name, package in missing.items())
    yield "\n`rlhf COMMAND --help` explains a command."
