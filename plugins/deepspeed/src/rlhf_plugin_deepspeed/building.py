"""Operators that DeepSpeed compiles at their first use."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
SILENT_SECONDS = 5.0
"""How long an operator may take to be there without a word."""


@cache
def compiled(builder: str) -> str:
    """Compile or load an operator of DeepSpeed's; returns why it cannot be had, or ""."""
    with _own_architecture(), _said_if_long(builder.removesuffix("Builder")):
        try:
            operator = get_accelerator().create_op_builder(builder)
            with _alone(Path(_get_build_directory(operator.name, False))):
                operator.load(verbose=False)
        except Exception as error:  # The compilers' failures have no type in common.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"DeepSpeed's own cannot be built here: {lines[0][:120]}"
    return ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One build at a time in `folder`, and none that waits for one that was killed.

    torch's own lock is a file of this name, which a killed build leaves behind for ever. Ours goes
    with the process; what it holds says that torch's is of a build in here.
    """
    with (folder / "rlhf.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # A file system without locks is left to torch's.
            yield
            return
        file.seek(0)
        if file.read():
            (folder / "lock").unlink(missing_ok=True)
        file.truncate(0)
        file.write("building")
        file.flush()
        yield
        file.truncate(0)


@contextmanager
def _said_if_long(operator: str) -> Iterator[None]:
    """One line on each host where this takes as long as compilers do."""
    line = f"building DeepSpeed's {operator}, once for this machine: a minute or two"
    timer = Timer(SILENT_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _own_architecture() -> Iterator[None]:
    """Build for the devices that are here: DeepSpeed cannot read entries such as "10.0a" in the
    variable."""
    before = os.environ.get(ARCHITECTURES)
    if torch.version.cuda and torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        os.environ[ARCHITECTURES] = ";".join(f"{major}.{minor}" for major, minor in sorted(found))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ARCHITECTURES, None)
        else:
            os.environ[ARCHITECTURES] = before
