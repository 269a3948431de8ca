"""The processes that pack a run's micro-batches ahead of the step."""

import signal
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rlhf.data.batch import PackedBatch
from rlhf.data.layout import Rows
from rlhf.data.order import RunOrder, SurveyRows

NO_STATE_EVERY = 1 << 30
"""Only the plan says where a run is, so the loader never takes a snapshot of its own state."""


def batches_from(
    order: RunOrder, *, first_step: int = 0, workers: int = 0, pin: bool = False
) -> Iterator[PackedBatch]:
    """Return this rank's packed micro-batches from `first_step` on: endless in training, one pass
    without shuffling.

    `workers` processes pack ahead; if one dies, RuntimeError is raised here. `pin` puts the tensors
    into page-locked memory.
    """
    last = None if order.shuffle else order.steps_per_epoch
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which newer torch deprecates.
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        loader = StatefulDataLoader(
            order,
            batch_size=None,
            sampler=MicroBatches(order, first_step, last),
            num_workers=workers,
            pin_memory=pin,
            collate_fn=Parcel.of,
            # The loader draws a seed. From the default generator, that would change what a resumed
            # run draws.
            generator=torch.Generator().manual_seed(order.seed),
            worker_init_fn=_keep_quiet if workers else None,
            # The rows are mapped into memory and no worker touches an accelerator, so a fork is
            # cheap and safe.
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=NO_STATE_EVERY,
        )
    return (parcel.unpack() for parcel in loader)


class MicroBatches(Sampler[Rows | SurveyRows]):
    """The plan as a sampler, computed as it is read."""

    def __init__(self, order: RunOrder, first: int, last: int | None) -> None:
        self._order, self._first, self._last = order, first, last

    def __iter__(self) -> Iterator[Rows | SurveyRows]:
        return self._order.micro_batches(self._first, self._last)


@frozen
class Parcel:
    """A PackedBatch as a worker sends it: one tensor per dtype, since each tensor takes a segment
    of shared memory."""

    flats: dict[torch.dtype, Tensor]
    shapes: dict[tuple[str, str], tuple[torch.dtype, torch.Size]]
    """Dtype and shape by field and name, in the order of the flat tensors."""
    rest: dict[str, Any]

    @classmethod
    def of(cls, batch: PackedBatch) -> "Parcel":
        """Return the batch as a parcel."""
        parts: dict[tuple[str, str], Tensor] = {}
        rest = {}
        for item in attrs.fields(PackedBatch):
            value = getattr(batch, item.name)
            if isinstance(value, Tensor):
                parts[item.name, ""] = value
            elif isinstance(value, dict):
                parts |= {(item.name, name): tensor for name, tensor in value.items()}
            else:
                rest[item.name] = value
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in parts.values():
            groups.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        shapes = {place: (tensor.dtype, tensor.shape) for place, tensor in parts.items()}
        return cls({dtype: torch.cat(group) for dtype, group in groups.items()}, shapes, rest)

    def unpack(self) -> PackedBatch:
        """Return the batch; its tensors are views of the parcel's."""
        fields: dict[str, Any] = dict(self.rest)
        starts = dict.fromkeys(self.flats, 0)
        for (name, key), (dtype, shape) in self.shapes.items():
            start = starts[dtype]
            starts[dtype] += shape.numel()
            view = self.flats[dtype][start : starts[dtype]].view(shape)
            if key:
                fields.setdefault(name, {})[key] = view
            else:
                fields[name] = view
        return PackedBatch(**fields)

    def pin_memory(self) -> "Parcel":
        """Return the parcel in page-locked memory; torch's loader calls this."""
        return attrs.evolve(self, flats={d: flat.pin_memory() for d, flat in self.flats.items()})


def _keep_quiet(worker: int) -> None:
    """Use one thread, and ignore Ctrl-C, after which the run still finishes its step."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
