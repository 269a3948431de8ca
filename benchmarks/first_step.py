"""CPU seconds (user and system) of the parts of a run's start, to the end of the first step.

`python benchmarks/first_step.py [PYTHON ...] [-- WORD ...]` runs the demo of sft, with words of its
command line, by one or more interpreters in turns; each has its own rlhf. Medians of REPEATS.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPEATS = 7
PROGRAM = """
import sys, time
time.perf_counter = time.process_time
from rlhf.commands.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A run whose clock counts CPU time."""
WORDS = ("run", "sft", "--train.stop_at", "1", "--train.samples", "0", "--overwrite")


def main(arguments: list[str]) -> None:
    """Print a line per part, with a column per interpreter."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    interpreters, words = arguments[:cut] or [sys.executable], arguments[cut + 1 :]
    starts: list[list[dict[str, float]]] = [[] for _ in interpreters]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(REPEATS + 1):
            for interpreter, seconds in zip(interpreters, starts, strict=True):
                parts = start(interpreter, [*words, "--output", folder])
                if turn:  # The first run fills the caches.
                    seconds.append(parts)
    for part in starts[0][0]:
        medians = [statistics.median(parts[part] for parts in seconds) for seconds in starts]
        print(f"{part:20}" + "".join(f"{median:8.2f}" for median in medians), flush=True)


def start(interpreter: str, words: list[str]) -> dict[str, float]:
    """Return the CPU seconds of each part, and their sum, of one run."""
    command = [interpreter, "-c", PROGRAM, *WORDS, *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    parts = json.loads(Path(words[-1], "summary.json").read_text())["startup"]
    return {**parts, "sum": sum(parts.values())}


if __name__ == "__main__":
    main(sys.argv[1:])
