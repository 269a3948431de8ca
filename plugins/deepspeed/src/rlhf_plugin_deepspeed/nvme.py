"""Weights, masters and moments that are on the CPU as files that are mapped into memory, on a disk
that is checked before any model loads (`deepspeed.nvme_path`; ZeRO-Infinity, arXiv 2104.07857).

They are tensors on the CPU as without files, so that optimizers, checkpoints and layouts need not
know. The kernel keeps in memory what fits there, writes it to the disk and reads it again.
"""

import os
import platform
import re
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.engine import Mesh, free_space, gib, write_speed
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf_plugin_deepspeed.plans import ZeroPlan

NETWORK = r"nfs4?|cifs|smb3|smbfs|lustre|ceph|gpfs|beegfs|wekafs|panfs|9p|fuse\..*"
ELSEWHERE = rf"tmpfs|ramfs|{NETWORK}"
"""File systems behind a network, and those in memory too."""
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
ZEROS, EMPTY = torch.ops.aten.zeros_like.default, torch.ops.aten.empty.memory_format


@frozen(kw_only=True)
class Drive:
    """The folder's disk, as the rank with the least of it finds it."""

    folder: Path
    free: int
    """Free bytes, divided by the ranks of the host."""
    speed: float
    """Bytes per second that a rank writes while the others of its host write too."""
    _models: dict[str, int] = Factory(dict)

    def check(self, role: str, size: int, *, first: bool = False) -> str:
        """Return what a model's `size` bytes of each rank cost. Raises RLHFError without room for
        it and those before it, of which the `first` has none."""
        if first:
            # What was rehearsed, or released, takes no room.
            self._models.clear()
        self._models[role] = size
        needed = sum(self._models.values())
        if needed > self.free:
            models = ", ".join(f"{name} {gib(each)}" for name, each in self._models.items() if each)
            raise SameOnAllRanks(
                f"deepspeed.nvme_path {self.folder} has {gib(self.free)} GiB free for each rank, "
                f"but needs {gib(needed)} GiB ({models}); choose another folder, or add ranks"
            )
        seconds = f"{size / self.speed:.1f} s to write at {self.speed / 1e9:.2f} GB/s"
        text = f" ({gib(size)} GiB of each rank in {self.folder}, {seconds} if not kept in memory)"
        return text if size else ""


def find_drive(folder: Path, mesh: Mesh) -> Drive:
    """Make the folder and measure its disk. Raises RLHFError where states cannot lie there.
    Collective."""
    speed, free, problem = 0.0, 0, ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All at once, as in a step.
        speed, free, kind = write_speed(folder), free_space(folder), file_system(folder)
        if re.fullmatch(ELSEWHERE, kind):
            problem = f" {folder} is not on a local disk ({kind}); choose a folder on one"
    except OSError as error:
        problem = f" {folder} cannot be used ({error.strerror}); choose another folder"
    except RLHFError as error:
        problem = f": {error}"
    found = mesh.gather((speed, free, platform.node(), problem))
    for *_, problem in found:
        if problem:
            raise SameOnAllRanks(f"deepspeed.nvme_path{problem}")
    hosts = [host for _, _, host, _ in found]
    shares = [free // hosts.count(host) for _, free, host, _ in found]
    return Drive(folder=folder, free=min(shares), speed=min(speed for speed, *_ in found))


def file_system(folder: Path, table: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that a folder is on, "" if the table lacks it."""
    path = folder.resolve()
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    kinds = {place.replace(r"\040", " "): kind for _, place, kind, *_ in map(str.split, lines)}
    return next((kinds[str(at)] for at in (path, *path.parents) if str(at) in kinds), "")


def state_files(plan: ZeroPlan) -> AbstractContextManager[Any]:
    """Return the context in which what is made on the CPU is in files, where the plan says so."""
    zero = plan.settings["zero_optimization"]
    offload = zero.get("offload_optimizer") or zero.get("offload_param") or {}
    return StateFiles(offload["nvme_path"]) if "nvme_path" in offload else nullcontext()


class StateFiles(TorchDispatchMode):
    """In this context flat tensors of floats on the CPU are files in `folder`, if they are made
    empty (shards of weights), copied or copied there (masters), or as zeros like another one
    (moments, in the first step). Files have no name, so that they end with the process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._pin_memory.default and is_in_file(args[0]):
            return args[0]
        if func in (*COPIES, ZEROS, EMPTY):
            like = torch.empty(args[0], device="meta") if func is EMPTY else args[0]
            device = torch.device(options.get("device") or like.device)
            dtype = options.get("dtype") or like.dtype
            if device.type == "cpu" and dtype.is_floating_point and like.ndim == 1 and like.numel():
                made = self._zeros(like.numel(), dtype)
                return made.copy_(like) if func in COPIES else made
        return func(*args, **options)

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # A page without room on the disk would end the process when it is written.
                os.posix_fallocate(file.fileno(), 0, dtype.itemsize * size)
                # A mapping of torch's keeps no descriptor open: a model may have many shards.
                path = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(path, shared=True, size=size, dtype=dtype)
        except OSError as error:
            message = f"cannot write to {self.folder}: {error.strerror}; free some space or choose"
            raise RLHFError(f"{message} another folder") from error


def is_in_file(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is neither torch's own nor pinned, as that of a file."""
    return not tensor.untyped_storage().resizable() and not tensor.is_pinned()
