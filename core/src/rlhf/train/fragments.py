"""The state of an engine on disk: flat fragments in safetensors, which any layout can read.

A tensor's key is NAME/KIND/OFFSET, so the headers of the files are their index. docs/runs.md
describes the format.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf.engine import GIB, Engine, EngineState, Fragment, Mesh
from rlhf.errors import RLHFError, SameOnAllRanks, listed
from rlhf.registry.gateway import BackendGateway
from rlhf.sharding import whole_shape

PLAIN = "state.json"
WEIGHT = "weight"
STEP = "step"
"""The kind that counts the updates of a weight, one number."""
LARGEST = 2 * GIB
"""Bytes after which a rank begins another file: so much of a device is on the host at once."""


def write_plain(engine: Engine, state: EngineState, folder: Path) -> Path:
    """Write what is not a tensor, with the shapes of all buffers, and of all parameters before
    sharding, and return the file. For one rank."""
    path = folder / PLAIN
    buffers = {name: list(buffer.shape) for name, buffer in engine.module.named_buffers()}
    whole = {name: list(whole_shape(item)) for name, item in engine.module.named_parameters()}
    plain = {"shapes": buffers | whole, "more": state.more}
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return path


def write_fragments(fragments: Sequence[Fragment], folder: Path, rank: int) -> list[Path]:
    """Write the fragments of this rank and return the files."""
    paths = []
    for number, part in enumerate(_in_parts(fragments)):
        paths.append(folder / f"rank-{rank:05d}-{number:03d}.safetensors")
        save_file(
            {f"{item.name}/{item.kind}/{item.offset}": item.values for item in part}, paths[-1]
        )
    return paths


def fragments_to_write(state: EngineState, mesh: Mesh) -> list[Fragment]:
    """Return what this rank writes: its own fragments, and a share of those that all ranks hold."""
    fragments = []
    for item in state.fragments:
        if item.replicated:
            parts = item.values.tensor_split(mesh.world)
            before = sum(part.numel() for part in parts[: mesh.rank])
            item = attrs.evolve(item, offset=item.offset + before, values=parts[mesh.rank])
        if item.values.numel():
            fragments.append(item)
    return fragments


def copied_to_host(fragments: Sequence[Fragment], device: torch.device) -> list[Fragment]:
    """Return copies in host memory, pinned where they come from a device."""
    copies = []
    for item in fragments:
        pinned = item.values.device.type != "cpu"
        host = torch.empty_like(item.values, device="cpu", pin_memory=pinned)
        copies.append(attrs.evolve(item, values=host.copy_(item.values, non_blocking=True)))
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return copies


def num_bytes(
    engines: Iterable[Engine], hooks: BackendGateway, mesh: Mesh, *, num_states: float
) -> int:
    """Return the bytes of a checkpoint of these engines, which are known before the first step; the
    optimizer has `num_states` numbers for each trained weight, in the dtype of its master.
    Collective."""
    own = 0.0
    for engine in engines:
        trained = {name for name, item in engine.module.named_parameters() if item.requires_grad}
        for item in fragments_to_write(hooks.save_checkpoint(engine=engine), mesh):
            if item.kind == WEIGHT:
                own += item.values.nbytes * (1 + num_states * (item.name in trained))
    return int(sum(mesh.gather(own)))


def check_model(folder: Path, module: nn.Module) -> None:
    """Raise RLHFError unless the engine in `folder` was trained on parameters of the same names and
    shapes as those of `module`, which has a place for each of its weights."""
    if not (folder / PLAIN).is_file():
        raise SameOnAllRanks(
            f"{folder.parent} has no {folder.name}, which this run trains; start again with "
            "--overwrite"
        )
    saved = json.loads((folder / PLAIN).read_text(encoding="utf-8"))["shapes"]
    for name, parameter in module.named_parameters():
        shape = list(whole_shape(parameter))
        if parameter.requires_grad and saved.get(name) != shape:
            has = f"of shape {saved[name]}" if name in saved else "missing"
            raise SameOnAllRanks(
                f"{folder.parent} is a checkpoint of another model: {name} is {has} in it but has "
                f"the shape {shape} in this run; restore the old model, or start again with "
                "--overwrite"
            )
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    if left := saved.keys() - own.keys():
        # Buffers that are computed have shapes but no values.
        kinds = SavedEngine(folder).kinds
        if names := sorted(name for name in left if kinds(name)):
            raise SameOnAllRanks(
                f"{folder.parent} is a checkpoint of another model: this run has no place for "
                f"{listed(names)}; restore the old model, or start again with --overwrite"
            )


class SavedEngine:
    """The state of an engine in a checkpoint: an `rlhf.engine.SavedState`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plain = json.loads((folder / PLAIN).read_text(encoding="utf-8"))
        self.shapes: dict[str, list[int]] = plain["shapes"]
        self.more: Mapping[str, Any] = plain["more"]
        self._slices: dict[str, dict[str, list[tuple[int, Any]]]] = defaultdict(dict)
        for path in sorted(folder.glob("rank-*.safetensors")):
            file = safe_open(path, "pt")
            for key in file.keys():  # noqa: SIM118 - not a mapping
                name, kind, offset = key.rsplit("/", 2)
                entry = (int(offset), file.get_slice(key))
                self._slices[name].setdefault(kind, []).append(entry)

    def kinds(self, name: str) -> Collection[str]:
        """Return the kinds of values that the checkpoint has of a weight."""
        return self._slices.get(name, {}).keys()

    def read(self, name: str, kind: str, offset: int, into: Tensor) -> None:
        """Fill `into`, flat, with the elements from `offset` on, reading no others."""
        end, filled = offset + into.numel(), 0
        for start, values in self._slices.get(name, {}).get(kind, []):
            first, last = max(start, offset), min(start + values.get_shape()[0], end)
            if first < last:
                into[first - offset : last - offset] = values[first - start : last - start].to(
                    into.device
                )
                filled += last - first
        if filled != into.numel():
            raise RLHFError(
                f"{self.folder} lacks elements {offset:,} to {end:,} of {name} ({kind}); "
                "it belongs to another model or backend"
            )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that were saved, whole and on the host. Floats are float32."""
        names = (name for name in self.shapes if WEIGHT in self.kinds(name))
        return {name: self.whole(name, WEIGHT) for name in names}

    def whole(self, name: str, kind: str) -> Tensor:
        """Return the values of a kind of a weight, whole and on the host. Floats are float32."""
        dtype = self._slices[name][kind][0][1][:0].dtype
        whole = torch.empty(
            self.shapes[name], dtype=torch.float32 if dtype.is_floating_point else dtype
        )
        self.read(name, kind, 0, whole.view(-1))
        return whole


def _in_parts(fragments: Sequence[Fragment]) -> Iterator[list[Fragment]]:
    """Yield the fragments in parts of at most `LARGEST` bytes, or of one fragment."""
    part: list[Fragment] = []
    size = 0
    for item in fragments:
        if part and size + item.values.nbytes > LARGEST:
            yield part
            part, size = [], 0
        part.append(item)
        size += item.values.nbytes
    if part:
        yield part
