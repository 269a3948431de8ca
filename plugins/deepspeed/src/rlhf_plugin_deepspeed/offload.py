"""An engine's states on the host while a phase of the run does not need them, by kind.

The memory of a tensor's storage is released and allocated again, as in FSDP (arXiv 2304.11277,
section 4.1), so that every view of a flat buffer is valid again after `reload`. DeepSpeed's own
`offload_states` refuses optimizers other than FusedAdam, and frozen parameters at stage 3.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from attrs import frozen
from deepspeed.accelerator import get_accelerator
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from rlhf.engine import StateKind
from rlhf_plugin_deepspeed.checkpoint import pieces
from rlhf_plugin_deepspeed.engine import InferenceEngine, TrainingEngine
from rlhf_plugin_deepspeed.weights import BackendSharding

PIECE = 1 << 28
"""Bytes that are copied at once: torch rounds an allocation of pinned memory up to a power of 2."""


@frozen(eq=False)
class HostCopy:
    """The contents of a storage whose memory on the device is released."""

    storage: UntypedStorage
    parts: list[Tensor]

    @classmethod
    def of(cls, storage: UntypedStorage) -> "HostCopy":
        """Start the copy to the host."""
        sources, pinned = _split(storage), storage.device.type != "cpu"
        parts = [torch.empty_like(item, device="cpu", pin_memory=pinned) for item in sources]
        for part, source in zip(parts, sources, strict=True):
            part.copy_(source, non_blocking=True)
        return cls(storage, parts)

    def restore(self) -> None:
        """Allocate the memory on the device and start the copy to it."""
        self.storage.resize_(sum(part.numel() for part in self.parts))
        for part, target in zip(self.parts, _split(self.storage), strict=True):
            target.copy_(part, non_blocking=True)


def offload(engine: InferenceEngine, kinds: Collection[StateKind]) -> int:
    """Move these kinds of states to the host; returns the bytes that this frees on the device."""
    accelerator = get_accelerator()
    # Other streams may still write what is copied.
    accelerator.synchronize()
    new = {
        kind: [HostCopy.of(storage) for storage in _storages(engine, kind)]
        for kind in kinds
        if kind not in engine.on_host
    }
    accelerator.synchronize()
    copies = [copy for of_kind in new.values() for copy in of_kind]
    freed = sum(copy.storage.nbytes() for copy in copies)
    for copy in copies:
        copy.storage.resize_(0)
    engine.on_host |= new
    return freed


def reload(engine: InferenceEngine, kinds: Collection[StateKind]) -> None:
    """Move these kinds of states back to the device, those that are on the host."""
    copies = [copy for kind in kinds for copy in engine.on_host.pop(kind, ())]
    for copy in copies:
        copy.restore()
    # Other streams read the states next.
    get_accelerator().synchronize()


def _split(storage: UntypedStorage) -> tuple[Tensor, ...]:
    """Return the bytes of a storage in pieces."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).split(PIECE)


def _storages(engine: InferenceEngine, kind: StateKind) -> list[UntypedStorage]:
    """Return the storages on the engine's device that hold states of one kind only."""
    storages = dict.fromkeys(item.untyped_storage() for item in _tensors(engine, kind))
    if kind != "weights":
        # In fp32 at stage 0, and with bf16 states, the optimizer updates the weights themselves.
        weights = {item.untyped_storage() for item in _tensors(engine, "weights")}
        storages = {storage: None for storage in storages if storage not in weights}
    # On the CPU, the memory may belong to a file or to NumPy.
    return [
        storage
        for storage in storages
        if storage.device.type == engine.device.type and storage.nbytes() and storage.resizable()
    ]


def _tensors(engine: InferenceEngine, kind: StateKind) -> Iterator[Tensor]:
    """Yield the tensors of one kind, some as views of the same storage."""
    if kind == "weights":
        for parameter in engine.module.parameters():
            yield parameter
            yield from BackendSharding().shards(parameter)
        yield from engine.module.buffers()
    elif not isinstance(engine, TrainingEngine):
        return
    elif kind == "optimizer":
        yield from _leaves(engine.deepspeed.basic_optimizer.state)
    elif kind == "masters":
        yield from (piece.master for piece in pieces(engine))
    else:
        yield from _gradients(engine)


def _gradients(engine: TrainingEngine) -> Iterator[Tensor]:
    """Yield what holds gradients, between micro-batches and between steps."""
    optimizer = engine.deepspeed.optimizer
    for parameter in engine.module.parameters():
        yield from _leaves((parameter.grad, getattr(parameter, "grad_accum", None)))
    for piece in pieces(engine):
        yield from _leaves(piece.master.grad)
    for name in ("averaged_gradients", "grad_partitions_flat_buffer"):
        yield from _leaves(getattr(optimizer, name, None))
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _leaves(bucket.buffer)


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nest of mappings, lists and tuples."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
