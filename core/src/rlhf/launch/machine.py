"""What this machine has for training: devices, memory, a compiler."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlhf.hookspecs import Finding

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = GIB
CGROUP = Path("/sys/fs/cgroup/memory.max")


def describe_machine() -> Iterator[Finding]:
    """Yield what is there, and what a feature lacks."""
    yield _devices()
    yield _memory()
    if SHARED_MEMORY.is_dir():
        yield _shared_memory()
    yield _compiler()


def output_of(command: Sequence[str]) -> str:
    """Return the first line that a program prints, or "" if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def _devices() -> Finding:
    if find_spec("torch") is None:
        return Finding(subject="accelerator", here="unknown without torch")
    import torch  # late: it may be missing

    version = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        name = torch.get_device_module(accelerator).get_device_name(0)
        _, total = torch.accelerator.get_memory_info(0)
        driver = f", driver {version}" if version else ""
        return Finding(
            subject="accelerator", here=f"{count} x {name}, {total / GIB:.1f} GiB each{driver}"
        )
    if not version:
        return Finding(subject="accelerator", here="none; runs use the CPU")
    return Finding(
        subject="accelerator",
        here=f"NVIDIA driver {version}, but torch {torch.__version__} finds no device",
        state="optional",
        feature="training on the GPU",
        remedy="install torch for CUDA as https://pytorch.org/get-started/locally says",
    )


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP.read_text(encoding="utf-8").strip() if CGROUP.is_file() else ""
    if limit.isdecimal():
        total = min(total, int(limit))
    cores = len(os.sched_getaffinity(0))
    return Finding(
        subject="host", here=f"{platform.system()}, {cores} cores, {total / GIB:.1f} GiB of memory"
    )


def _shared_memory() -> Finding:
    status = os.statvfs(SHARED_MEMORY)
    size = status.f_frsize * status.f_blocks
    here = f"{size / GIB:.1f} GiB"
    if size >= LEAST_SHARED:
        return Finding(subject="shared memory", here=here)
    return Finding(
        subject="shared memory",
        here=here,
        state="optional",
        feature="NCCL between the devices of a host",
        remedy="docker run --shm-size 8g",
    )


def _compiler() -> Finding:
    program = os.environ.get("CXX") or "c++"
    if shutil.which(program):
        return Finding(subject="compiler", here=output_of([program, "--version"]) or program)
    return Finding(
        subject="compiler",
        here=f"{program} is missing",
        state="optional",
        feature="kernels that Triton and torch compile",
        remedy="apt install g++",
    )
