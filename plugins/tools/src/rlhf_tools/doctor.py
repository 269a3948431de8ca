"""`rlhf doctor`: what this machine and installation have, what a feature lacks, and the remedy.

The backend adds what it knows through the hook `diagnose`, and a generation engine through a method
`diagnose` of its settings.
"""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import attrs
from huggingface_hub.constants import HF_HUB_CACHE

from rlhf.cli import cache_root, find_backend, installed, is_satisfied, known_plugins
from rlhf.engine import GIB, free_space, write_speed
from rlhf.errors import RLHFError, first_line
from rlhf.hookspecs import Finding
from rlhf.preview import build_backend, installed_kernels, load_backend
from rlhf_tools.engines import engine_findings, read_words

VERSIONS = ("rlhf-core", "torch", "transformers")
FEATURES = {"quantize": "model.quantize"}
"""What needs an extra of rlhf-core."""
FOLDERS = {
    "run folders": (Path("runs"), "set output to a folder that can be written"),
    "cache of rows": (cache_root(), "set RLHF_CACHE to a folder that can be written"),
    "cache of models": (Path(HF_HUB_CACHE), "set HF_HOME to a folder that can be written"),
}
COLUMNS = (8, 15)


def doctor_command(*, as_json: bool, words: Sequence[str] = ()) -> int:
    """Print all findings, with those of the generation engine that the words after `rlhf doctor`
    configure; returns 2 if something is missing that every run needs, else 0."""
    config = read_words(words) if words else None
    findings = [*_versions(), *_packages(), *_kernels(), *describe_machine(), *_disks()]
    findings += [*_backends(), *engine_findings(config)]
    if as_json:
        print(json.dumps([attrs.asdict(each) for each in findings], indent=2))
    else:
        for each in findings:
            print("\n".join(_lines(each)))
    return 2 if any(each.state == "missing" for each in findings) else 0


def _lines(finding: Finding) -> Iterator[str]:
    """Yield the finding in columns, and its remedy on a line below."""
    state, subject = COLUMNS
    yield f"{finding.state:{state}}  {finding.subject:{subject}}  {finding.here}"
    if finding.state != "ok":
        feature = f"for {finding.feature}: " if finding.feature else ""
        yield f"{'':{state + subject + 2}}  {feature}{finding.remedy}"


def _versions() -> Iterator[Finding]:
    versions = [f"{name} {metadata.version(name)}" for name in VERSIONS if is_satisfied(name)]
    yield Finding(
        subject="versions", here=", ".join([f"Python {platform.python_version()}", *versions])
    )


def _packages() -> Iterator[Finding]:
    """Yield each requirement of core and of the installed plugins that is not satisfied."""
    names = {"rlhf-core", *(row.distribution for row in installed())}
    for name in sorted(names):
        for line in metadata.requires(name) or ():
            requirement, _, marker = line.partition(";")
            extra = next(iter(re.findall(r"extra == ['\"](\w+)['\"]", marker)), "")
            is_feature = name == "rlhf-core" and extra in FEATURES
            if is_satisfied(line, extra=extra) or (extra and not is_feature):
                continue
            yield Finding(
                subject=extra or name,
                here=f"{requirement.strip()} is not installed",
                state="optional" if extra else "missing",
                feature=FEATURES.get(extra, ""),
                remedy=f"pip install '{f'{name}[{extra}]' if extra else requirement.strip()}'",
            )


def _kernels() -> Iterator[Finding]:
    """Yield what the installed kernels find, or that there are none."""
    try:
        kernels = installed_kernels()
    except Exception as error:  # A plugin's code may raise anything.
        here = first_line(error)
        yield Finding(subject="kernels", here=here, state="missing", remedy="rlhf plugins check")
        return
    if kernels is not None:
        yield from kernels.diagnose()
        return
    yield Finding(
        subject="kernels", here="none; layers run in plain torch", state="optional",
        feature="fused and compiled layers on CUDA",
        remedy=f"pip install {known_plugins('kernels')['triton']}",
    )  # fmt: skip


def _disks() -> Iterator[Finding]:
    for subject, (folder, remedy) in FOLDERS.items():
        try:
            speed = write_speed(folder)
        except (RLHFError, OSError) as error:  # A special file system may refuse in its own way.
            yield Finding(subject=subject, here=first_line(error), state="missing", remedy=remedy)
            continue
        free = f"{free_space(folder) / GIB:.1f} GiB free, writes {speed / 1e6:.0f} MB/s"
        place = str(folder).replace(str(Path.home()), "~")
        yield Finding(subject=subject, here=f"{place}: {free}")


def _backends() -> Iterator[Finding]:
    """Yield what each installed backend finds."""
    names = sorted({row.name for row in installed() if row.kind == "backend"})
    for name in names or (None,):
        try:
            yield from build_backend(load_backend(find_backend(name)), ()).diagnose()
        except Exception as error:  # A plugin's code may raise anything.
            here = first_line(error)
            remedy = "rlhf plugins check" if name else "pip install rlhf-plugin-deepspeed"
            yield Finding(subject=name or "backend", here=here, state="missing", remedy=remedy)


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
