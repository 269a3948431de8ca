"""What this machine has for DeepSpeed, for `rlhf doctor`."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import evolve
from deepspeed.accelerator import get_accelerator
from torch import distributed

from rlhf.errors import RLHFError
from rlhf.hookspecs import Finding
from rlhf_plugin_deepspeed.builds import owner_of
from rlhf_plugin_deepspeed.capabilities import BEFORE, CAPABILITIES, LEAST, check_version
from rlhf_plugin_deepspeed.mesh import precisions
from rlhf_plugin_deepspeed.patches.table import NEWEST
from rlhf_plugin_deepspeed.versions import installed_version, older


def diagnose() -> list[Finding]:
    """Return the findings on DeepSpeed's version, precisions and communication."""
    version = installed_version()
    found = [_version(version), *_too_new_for(version), _precisions(), _communication()]
    return [*found, *_old_locks()]


def _version(version: str) -> Finding:
    try:
        check_version(version)
    except RLHFError as error:
        message, _, remedy = str(error).partition("; run ")
        return Finding(subject="deepspeed", here=message, state="missing", remedy=remedy)
    if not older(NEWEST, version):
        return Finding(subject="deepspeed", here=f"{version}, with all patches")
    return Finding(
        subject="deepspeed",
        here=f"{version}, with correctness patches only",
        state="optional",
        feature="patches for speed",
        remedy=f"pip install 'deepspeed=={NEWEST}'",
    )


def _too_new_for(version: str) -> Iterator[Finding]:
    """Yield the capabilities that the installed version lacks."""
    for row in CAPABILITIES:
        if older(LEAST, row.least) and older(version, row.least):
            yield Finding(
                subject="deepspeed",
                here=f"{version} is older than {row.least}",
                state="optional",
                feature=row.setting or row.feature,
                remedy=f"pip install 'deepspeed>={row.least},<{BEFORE}'",
            )


def _precisions() -> Finding:
    here = precisions()
    finding = Finding(subject="model.dtype", here=", ".join(here))
    if "bf16" in here:
        return finding
    feature, remedy = "model.dtype bf16, the default", f"set model.dtype to {here[-1]}"
    return evolve(finding, state="optional", feature=feature, remedy=remedy)


def _communication() -> Finding:
    name = str(get_accelerator().communication_backend_name())
    if distributed.is_backend_available(name):
        version = ".".join(map(str, torch.cuda.nccl.version())) if name == "nccl" else ""
        return Finding(subject="communication", here=f"{name} {version}".strip())
    return Finding(
        subject="communication",
        here=f"torch has no {name}",
        state="missing",
        remedy="install a build of torch for this accelerator",
    )


def _old_locks() -> Iterator[Finding]:
    """Yield the locks of operators whose build was killed, as far as this host can tell."""
    from torch.utils.cpp_extension import get_default_build_root  # late: start-up time

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    says = {
        "none": ("was left by a build that was killed", ""),
        "unknown": ("is of a build that may have been killed", "if no build is running: "),
    }
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        if (owner := owner_of(lock)) in says:
            problem, condition = says[owner]
            yield Finding(
                subject="operators",
                here=f"{lock} {problem}",
                state="optional",
                feature="operators that torch compiles, which wait for it",
                remedy=f"{condition}rm {lock}",
            )
