"""Bytes that a step of a trainer takes beside the weights, counted while it runs."""

from collections.abc import Iterable

import attrs
import torch
from attrs import frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.journal.sums import weighted_loss
from rlhf.memory.live_bytes import LiveBytes
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
