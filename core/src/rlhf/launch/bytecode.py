"""Compiles the libraries of a run to bytecode, on all cores; an import compiles on one."""

import compileall
import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec

from rlhf.launch.signals import die_with

LIBRARIES = (
    "torch", "sympy", "mpmath", "transformers", "deepspeed", "triton", "networkx", "pandas",
    "peft", "datasets", "huggingface_hub", "numpy", "accelerate", "pydantic",
)  # fmt: skip
"""What takes longest, in about the order in which a run imports it. If it imports others, it
compiles them itself."""

SKIPPED = re.compile(r"/(tests?|testing)/|^/models/(?!auto/)")
"""What hardly any run imports, below a library's folder."""

MOST_PROCESSES = 16
"""These take about a second; a quota may allow fewer cores than are counted."""


def main(parent: int) -> None:
    """Compile what has no bytecode yet, in one process per core, unless `parent` dies."""
    die_with(parent)
    os.nice(10)
    files = [file for library in LIBRARIES for file in sources(library)]
    processes, own = min(MOST_PROCESSES, len(os.sched_getaffinity(0))), os.getpid()
    for first in range(processes):
        if os.fork() == 0:
            die_with(own)
            for file in files[first::processes]:
                compileall.compile_file(file, quiet=2)
            return
    with suppress(ChildProcessError):  # All have ended.
        while True:
            os.wait()


def sources(library: str) -> list[str]:
    """Return the files of a package that are compiled."""
    spec = find_spec(library)
    return sorted(
        f"{folder}/{name}"
        for top in (spec and spec.submodule_search_locations) or ()
        for folder, _, names in os.walk(top)
        for name in names
        if name.endswith(".py") and not SKIPPED.search(f"{folder}/".removeprefix(top))
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
