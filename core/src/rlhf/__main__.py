"""`rlhf` and `python -m rlhf`, the same command for torchrun, srun and the deepspeed launcher."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Never

from rlhf.commands.main import main
from rlhf.config.sections import STOP_SIGNALS
from rlhf.launch.signals import catch, end_late, hold_back, release

EXIT_SECONDS, EXIT_SECONDS_HUNG = 60.0, 5.0
"""How long threads and exit functions of libraries may take at the end, also if an observer of the
run hangs: a tracker may wait for its server for ever."""


def run_process() -> Never:
    """Run the command and end the process, without the interpreter's own end: before CPython 3.14
    that aborts the process if a thread of a collective waits for the interpreter's lock."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Closed by what has started this process.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    # DeepSpeed's launcher puts its own argument first.
    trains = "run" in sys.argv[1:3]
    if trains:
        hold_back()
        end_late()
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # It may have no reader any more.
                stream.flush()
        os._exit(code)

    # Called last: what registers other functions has not been imported yet.
    atexit.register(leave)
    try:
        code = main()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    finally:
        if trains:
            # The run is over: a signal ends what libraries do at their end, and keeps its code.
            catch(lambda *_: leave(), STOP_SIGNALS)
            release()
        latest = threading.Timer(_exit_seconds(), leave)
        latest.daemon = True
        latest.start()
    sys.exit(code)


def _exit_seconds() -> float:
    if threading.active_count() == 1:
        return EXIT_SECONDS
    from rlhf.registry.observers import ObserverThread  # late: start-up time

    hung = any(isinstance(thread, ObserverThread) for thread in threading.enumerate())
    return EXIT_SECONDS_HUNG if hung else EXIT_SECONDS


if __name__ == "__main__":
    run_process()
