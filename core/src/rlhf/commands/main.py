"""The command `rlhf`: turns what a command raises into messages and exit codes."""

import io
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.commands.parsing import act
from rlhf.errors import RanksFailed, RLHFError, SameOnAllRanks, first_line, place_of
from rlhf.launch.proxies import bypass_proxies
from rlhf.launch.signals import PROBLEMS

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
            advice *= words[:1] == ["run"]
            print(f"error: interrupted{advice}", file=sys.stderr)
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
        print(
            f"error: cannot write to standard output ({problem}); redirect it elsewhere",
            file=sys.stderr,
        )
        return 2
    except Exception as error:
        _print_place(error)
        raise


def _print_place(error: Exception) -> None:
    """Print which method of a plugin raised the error and where, if that is known."""
    if place := place_of(error):
        _print_error(f"{place}: {type(error).__name__}: {first_line(error)}")


def _print_error(text: str) -> None:
    """Print an error of this rank, and tell it to the process that has started the ranks."""
    rank = os.environ.get("RANK", "0")
    where = f" on rank {rank}" * (rank != "0")
    print(f"error{where}: {text}", file=sys.stderr, flush=True)
    if PROBLEMS in os.environ:
        os.write(int(os.environ[PROBLEMS]), f"{text}\n".encode())


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
        text = "the current folder no longer exists; change to another"
        raise RLHFError(text) from None


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
