"""Operators that DeepSpeed compiles when they are first used."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Timer

from deepspeed.accelerator import get_accelerator
from filelock import FileLock
from torch.utils.cpp_extension import _get_build_directory

from rlhf.errors import first_line
from rlhf_plugin_deepspeed.quiet import silenced

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
SILENT_SECONDS = 5.0
"""How long an operator may take to load before a line says why."""


@cache
def compiled(builder: str) -> str:
    """Compile or load an operator of DeepSpeed's; returns why that failed, or ""."""
    with silenced(), _local_architecture(), _announced_if_long(builder.removesuffix("Builder")):
        try:
            operator = get_accelerator().create_op_builder(builder)
            with _one_build(Path(_get_build_directory(operator.name, False))):
                operator.load(verbose=False)
        except Exception as error:  # The compilers' failures have no type in common.
            return f"DeepSpeed's cannot be built here: {first_line(error)}"
    return ""


@contextmanager
def _one_build(folder: Path) -> Iterator[None]:
    """Run one build at a time in `folder`. torch's own lock, the file `lock`, outlives a killed
    build. Ours ends with the process; `rlhf.building` says that torch's was made under ours."""
    lock, building = FileLock(folder / "rlhf.lock"), folder / "rlhf.building"
    with ExitStack() as stack:
        # On a file system without locks, torch's is all there is.
        with suppress(OSError, NotImplementedError):
            stack.enter_context(lock)
            if building.exists():
                (folder / "lock").unlink(missing_ok=True)
            building.touch()
        yield
        building.unlink(missing_ok=True)


@contextmanager
def _announced_if_long(operator: str) -> Iterator[None]:
    """Print one line on each host if this takes as long as a compiler does."""
    line = f"compiling DeepSpeed's {operator}: a minute or two, once per machine"
    timer = Timer(SILENT_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _local_architecture() -> Iterator[None]:
    """Build for this machine's devices only: DeepSpeed cannot read all entries, such as "10.0a"."""
    named = os.environ.pop(ARCHITECTURES, None)
    try:
        yield
    finally:
        if named is not None:
            os.environ[ARCHITECTURES] = named
