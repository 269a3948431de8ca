"""Bytes that a step of a trainer takes beside the weights, counted while it runs."""

import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.data.batch import PackedBatch
from rlhf.journal.sums import weighted_loss
from rlhf.trainer import Trainer


@frozen
class StepBytes:
    """Bytes of one step on one micro-batch."""

    activations: int
    """Bytes alive when backward begins."""
    peak: int
    """The peak of survey, loss and backward, with gradients that wait for their reduction."""
    growing: int
    """The peak including all gradients of weights so far."""


def step_bytes(
    trainer: Trainer,
    batch: PackedBatch,
    modules: Iterable[torch.nn.Module],
    *,
    gradients: int,
    reducing: int = 0,
) -> StepBytes:
    """Run survey, loss and backward on `batch` and return what they take.

    Gradients of weights are released at once. They belong to the backend: all of them take
    `gradients` bytes, and up to `reducing` bytes of them are whole until they are reduced. A survey
    of other examples runs on those of the loss.
    """
    weights = [weight for module in modules for weight in module.parameters()]
    with LiveBytes(known=weights) as counter:
        meter = _Meter(counter, weights, gradients=gradients, reducing=reducing)
        try:
            if trainer.needs_survey():
                batch = attrs.evolve(batch, step=_survey(trainer, batch))
            loss = trainer.loss(batch)
            total = weighted_loss(loss, {term.per: 1.0 for term in loss.terms})
            activations = counter.live
            total.backward()
            meter.look()
        finally:
            meter.close()
    return StepBytes(activations, meter.peak, meter.growing)


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made while the mode is on and still alive, on any device
    including meta. Storages of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self._peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known
        )

    def take_peak(self) -> int:
        """Return the most bytes that were alive at one time since the last call."""
        peak, self._peak = self._peak, self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        weakref.finalize(storage, self._free, size).atexit = False
        self.live += size
        self._peak = max(self._peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


class _Meter:
    """Peaks of a step, updated whenever a weight's gradient is complete."""

    def __init__(
        self, counter: LiveBytes, weights: Iterable[Tensor], *, gradients: int, reducing: int
    ) -> None:
        trained = [weight for weight in weights if weight.requires_grad]
        self._counter = counter
        self._gradients, self._reducing = gradients, reducing
        self._total = sum(weight.numel() for weight in trained)
        self._numel = 0
        """Elements of gradients that are complete."""
        self._bytes = 0
        """Bytes of gradients that are complete, as autograd made them."""
        self.peak = self.growing = 0
        self._handles = [
            weight.register_post_accumulate_grad_hook(self._release) for weight in trained
        ]

    def look(self) -> None:
        """Take the counter's peak since the last look into account."""
        live = self._counter.take_peak()
        self.growing = max(self.growing, live + self._gradients * self._numel // self._total)
        self.peak = max(self.peak, live + min(self._bytes, self._reducing))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _release(self, weight: Tensor) -> None:
        self.look()
        self._numel += weight.numel()
        self._bytes += weight.nbytes
        weight.grad = None
        # From here on this gradient counts in `_numel`, no longer in the counter.
        self._counter.take_peak()


def _survey(trainer: Trainer, batch: PackedBatch) -> dict[str, Tensor]:
    with torch.no_grad():
        values = dict(trainer.survey(batch))
    own = {"examples": batch.num_examples, "answers": batch.num_answers}
    device = batch.tokens.device
    return values | {n: torch.zeros(k, dtype=torch.long, device=device) for n, k in own.items()}
