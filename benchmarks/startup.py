"""CPU time (user and system) of the commands that must answer at once; exit 1 above the limit."""

import resource
import subprocess
import sys
from pathlib import Path

LIMIT = 0.2
"""Seconds."""
REPEATS = 5
COMMANDS = (
    ("--help",),
    ("plugins",),
    ("config", "sft"),
    ("run", "sft", "--optim.lrr", "1e-5"),
)


def main() -> int:
    """Print a line per command and return the exit code."""
    slow = False
    for words in COMMANDS:
        seconds = min(cpu_seconds(words) for _ in range(REPEATS))
        slow = slow or seconds > LIMIT
        print(f"{seconds:6.3f} s  rlhf {' '.join(words)}")
    print(f"limit {LIMIT} s: {'exceeded' if slow else 'kept'}")
    return int(slow)


def cpu_seconds(words: tuple[str, ...]) -> float:
    """User and system time of one run; the least of several is the program's own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = Path(sys.executable).with_name("rlhf")
    subprocess.run([command, *words], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
