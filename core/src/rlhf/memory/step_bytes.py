"""Bytes that a step of a trainer takes in addition to the weights, counted while it runs."""

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.contract.sums import weighted_loss
from rlhf.data.batch import PackedBatch
from rlhf.trainer import Trainer


@frozen
class CountedStep:
    """A survey, and loss and backward of one micro-batch, as they were counted, for any way of
    storing gradients."""

    activations: int
    """Bytes alive when backward begins."""
    peaks: tuple[tuple[int, int, int], ...]
    """Whenever the gradient of a weight is complete, and at the end: bytes at the peak since the
    time before, and elements and bytes of the gradients complete by then."""
    total: int
    """Elements of all trained weights."""
    survey: int = 0
    """Bytes at the peak of the survey, when no gradient exists."""

    def peak(self, *, reducing: int = 0) -> int:
        """Return the peak of loss and backward while at most `reducing` bytes of gradients wait to
        be reduced. Above `activations` it has the head's logits and gradients of activations."""
        return max(live + min(whole, reducing) for live, _, whole in self.peaks)

    def peak_with_gradients(self, gradients: int) -> int:
        """Return the peak of a step of one micro-batch, with the gradients of weights that are
        complete at each moment; all of them take `gradients` bytes."""
        return max(live + gradients * done // self.total for live, done, _ in self.peaks)


def count_step(
    trainer: Trainer,
    batch: PackedBatch,
    modules: Iterable[torch.nn.Module],
    *,
    surveyed: PackedBatch | None = None,
) -> CountedStep:
    """Run the survey on `surveyed`, by default on `batch`, then loss and backward on `batch`, and
    return what they take. Gradients of weights are released at once, since they belong to the
    backend."""
    weights = [weight for module in modules for weight in module.parameters()]
    trained = [weight for weight in weights if weight.requires_grad]
    total = sum(weight.numel() for weight in trained)
    with LiveBytes(known=weights) as counter, ExitStack() as hooks:
        peaks, survey = list[tuple[int, int, int]](), 0
        complete = {"numel": 0, "nbytes": 0}

        def look() -> None:
            peaks.append((counter.take_peak(), complete["numel"], complete["nbytes"]))

        def release(weight: Tensor) -> None:
            look()
            complete["numel"] += weight.numel()
            complete["nbytes"] += weight.nbytes
            weight.grad = None
            counter.take_peak()

        for weight in trained:
            hooks.callback(weight.register_post_accumulate_grad_hook(release).remove)
        if trainer.needs_survey():
            with torch.no_grad():
                values = dict(trainer.survey(surveyed or batch))
            batch = attrs.evolve(batch, step=values | _positions(batch))
            survey = counter.take_peak()
        loss = trainer.loss(batch)
        activations = counter.live
        weighted_loss(loss, {term.per: 1.0 for term in loss.terms}).backward()
        look()
    return CountedStep(activations, tuple(peaks), total, survey)


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


def _positions(batch: PackedBatch) -> dict[str, Tensor]:
    """Return positions of the batch's examples and answers among surveyed values."""
    sizes = {"examples": batch.num_examples, "answers": batch.num_answers}
    device = batch.tokens.device
    return {name: torch.zeros(n, dtype=torch.long, device=device) for name, n in sizes.items()}
