"""What this machine has for DeepSpeed, for `rlhf doctor`. Nothing is compiled."""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops
from deepspeed.ops.op_builder import builder as builders
from torch import distributed
from torch.utils import cpp_extension

from rlhf.errors import RLHFError
from rlhf.hookspecs import Finding
from rlhf_plugin_deepspeed.capabilities import BEFORE, CAPABILITIES, LEAST, check_version
from rlhf_plugin_deepspeed.mesh import precisions
from rlhf_plugin_deepspeed.patches.table import NEWEST
from rlhf_plugin_deepspeed.versions import installed_version, older


def diagnose() -> list[Finding]:
    """Return the findings on DeepSpeed's version, precisions, communication and operators."""
    version = installed_version()
    return [_version(version), *_too_new_for(version), _precisions(), _communication(), _cpu_adam()]


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


def _cpu_adam() -> Finding:
    builder: Any = get_accelerator().create_op_builder("CPUAdamBuilder")
    library = Path(cpp_extension._get_build_directory(builder.name, False), f"{builder.name}.so")
    here, remedy = "compiled", ""
    if installed_ops.get(builder.name) and accelerator_name == get_accelerator().device_name():
        here = "installed with DeepSpeed"
    elif not library.is_file():
        here, remedy = _obstacle(builder)
    finding = Finding(subject=builder.name, here=here)
    if not remedy:
        return finding
    feature = "deepspeed.offload_optimizer; torch's AdamW takes its place"
    return evolve(finding, state="optional", feature=feature, remedy=remedy)


def _obstacle(builder: Any) -> tuple[str, str]:
    """Return what prevents the operator from being compiled, and the remedy, or "" for it."""
    compiler = os.environ.get("CXX") or "c++"
    if not shutil.which(compiler):
        return f"cannot be compiled: {compiler} is missing", "apt install g++"
    if not cpp_extension.is_ninja_available():
        return "cannot be compiled: ninja is missing", "pip install ninja"
    if isinstance(builder, builders.CUDAOpBuilder) and not builder.is_rocm_pytorch():
        try:
            builders.installed_cuda_version()
        except builders.MissingCUDAException:
            remedy = f"install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME to it"
            return "cannot be compiled: nvcc is missing", remedy
    with redirect_stdout(io.StringIO()):
        fits = builder.is_compatible(verbose=False)
    if not fits:
        return "cannot be compiled here", "python -m deepspeed.env_report"
    return "not compiled yet; its first use takes half a minute", ""
