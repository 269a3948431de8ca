"""Masters and moments of an optimizer on the CPU as files that are mapped into memory, on a disk
that is checked before any model loads (`deepspeed.nvme_path`; ZeRO-Infinity, arXiv 2104.07857).

They are tensors on the CPU as without files, so that optimizers, checkpoints and layouts need not
know. The kernel keeps in memory what fits there, writes it to the disk and reads it again.
"""

import mmap
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.engine import Mesh, free_space, gib, write_speed
from rlhf.errors import RLHFError, SameOnAllRanks

ELSEWHERE = r"tmpfs|ramfs|nfs4?|cifs|smb3|smbfs|lustre|ceph|gpfs|beegfs|wekafs|panfs|9p|fuse\..*"
"""File systems in memory or behind a network."""
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
ZEROS = torch.ops.aten.zeros_like.default


@frozen(kw_only=True)
class Drive:
    """The folder's disk, as the rank with the least of it finds it."""

    folder: Path
    free: int
    """Free bytes, divided by the ranks of the host."""
    speed: float
    """Bytes per second that a rank writes while the others of its host write too."""
    _models: dict[str, int] = Factory(dict)

    def check(self, role: str, size: int) -> str:
        """Return what a model's `size` bytes of each rank cost. Raises RLHFError without room."""
        self._models[role] = size
        size = sum(self._models.values())
        if size > self.free:
            raise SameOnAllRanks(
                f"deepspeed.nvme_path {self.folder} has {gib(self.free)} GiB free for each rank, "
                f"but its masters and moments take {gib(size)} GiB; choose another folder, or add "
                "ranks"
            )
        return (
            f" ({gib(size)} GiB of each rank in {self.folder}, which a rank writes at "
            f"{self.speed / 1e9:.2f} GB/s: at least {size / self.speed:.1f} s of a step, and about "
            "as long to read them, unless they stay in memory)"
        )


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
    mounts = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    kinds = {place.replace(r"\040", " "): kind for _, place, kind, *_ in mounts}
    return next((kinds[str(at)] for at in (path, *path.parents) if str(at) in kinds), "")


class StateFiles(TorchDispatchMode):
    """In this context flat float32 tensors that are copied to the CPU, copied there or made as
    zeros like another one are files in `folder`: masters, and moments in the first step. Files have
    no name, so that they end with the process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if function is torch.ops.aten._pin_memory.default and self.holds(args[0]):
            return args[0]
        if function in (*COPIES, ZEROS) and args[0].dim() == 1 and args[0].numel():
            device = options.get("device") or args[0].device
            dtype = options.get("dtype") or args[0].dtype
            if torch.device(device).type == "cpu" and dtype == torch.float32:
                made = self._zeros(args[0].numel())
                return made if function is ZEROS else made.copy_(args[0])
        return function(*args, **options)

    def _zeros(self, size: int) -> Tensor:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # A page without room on the disk would end the process when it is written.
                os.posix_fallocate(file.fileno(), 0, 4 * size)
                made = torch.frombuffer(mmap.mmap(file.fileno(), 4 * size), dtype=torch.float32)
        except OSError as error:
            message = f"cannot write to {self.folder}: {error.strerror}; free some space or choose"
            raise RLHFError(f"{message} another folder") from error
        self._made.add(made.data_ptr())
        return made

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in one of the files."""
        return tensor.untyped_storage().data_ptr() in self._made
