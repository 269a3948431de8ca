"""How far a student's distribution is from its teacher's, by chunks of predictions: of neither is
there a tensor of tokens times vocabulary.

The gradient is computed with the value, chunk by chunk, and only scaled in backward: the teacher's
head is then no longer needed, which ZeRO-3 has given back by that time. It also saves computing
both models' logits a second time. The price is that only the sum over predictions has a gradient.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.engine import Engine
from rlhf.model.head import Head
from rlhf.readouts import Sums, capped_logits

CHUNK = 1024
"""Predictions whose logits exist at the same time: 0.6 GiB in float32 at a vocabulary of 152k, for
each of about six such tensors."""

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`measure(student, teacher)`: of two sets of log-probabilities [n, M] the divergence [n], and its
derivative by each of the student's log-probabilities as if they were free of one another [n, M]."""


class Teacher(Protocol):
    """What is known of a teacher's distribution at the N predictions of a batch."""

    def compare(
        self, rows: slice, student: Tensor, measure: Measure, temperature: float
    ) -> "Comparison":
        """The teacher at the predictions `rows` against the student's log-probabilities [n, V],
        both at `temperature`."""


@frozen
class Comparison:
    """A chunk of n predictions."""

    divergence: Tensor
    """[n]."""
    kl: Tensor
    """KL(teacher || student) [n], a yardstick that is the same for every measure."""
    slope: Tensor
    """Derivative of the divergence by the student's log-probabilities [n, V]."""
    likeliest: Tensor
    """The teacher's likeliest token [n]."""


@frozen
class WholeTeacher:
    """A teacher's hidden states and its head: the whole vocabulary."""

    hidden: Tensor
    """[N, H] of the teacher."""
    head: Head

    def compare(
        self, rows: slice, student: Tensor, measure: Measure, temperature: float
    ) -> Comparison:
        """See `Teacher`."""
        head = self.head
        logits, _ = capped_logits(
            self.hidden[rows], head.weight, head.bias, head.scale, head.softcap
        )
        teacher = logits.div_(temperature).log_softmax(-1)
        divergence, slope = measure(student, teacher)
        return Comparison(divergence, forward_kl(student, teacher), slope, teacher.argmax(-1))


@frozen
class TopTeacher:
    """A teacher's k likeliest tokens, and the mass of all others as one outcome more."""

    tokens: Tensor
    """Token ids, the likeliest first [N, k]."""
    logprobs: Tensor
    """Their log-probabilities at the run's temperature, then that of all others together
    [N, k + 1], float32."""

    def compare(
        self, rows: slice, student: Tensor, measure: Measure, temperature: float
    ) -> Comparison:
        """See `Teacher`; the student's distribution is taken over the same k + 1 outcomes."""
        tokens, teacher = self.tokens[rows], self.logprobs[rows]
        others = student.scatter(-1, tokens, -torch.inf)
        tail = others.logsumexp(-1, keepdim=True)
        own = torch.cat([student.gather(-1, tokens), tail], dim=-1)
        divergence, pull = measure(own, teacher)
        # The tail's log-probability moves with each token's by that token's share of the tail.
        slope = others.sub_(tail).exp_().mul_(pull[:, -1:]).scatter_(-1, tokens, pull[:, :-1])
        return Comparison(divergence, forward_kl(own, teacher), slope, tokens[:, 0])


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of log-probabilities [n, M] -> [n]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


@frozen
class Mixture:
    """What is minimised: (1 - nll) * temperature^2 * divergence + nll * negative log-likelihood."""

    measure: Measure
    temperature: float = 1.0
    """Divides both models' logits. The square keeps gradients of the same size (Hinton et al.,
    arXiv 1503.02531, section 2)."""
    nll: float = 0.0
    """Share of the negative log-likelihood of the predicted token, at temperature 1."""
    chunk: int = CHUNK


def distil(
    student: Engine, teacher: Engine, batch: PackedBatch, mixture: Mixture
) -> Mapping[str, Tensor]:
    """`divergence` of the student from a teacher that runs beside it. Collective at ZeRO-3.

    The student's forward runs within the teacher's, so that both heads are there at the same time
    at any stage; the gradient is the student's alone.
    """
    wanted = torch.is_grad_enabled()
    found: dict[str, Tensor] = {}

    def run_student(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        states = WholeTeacher(hidden.index_select(0, batch.predict_from), head)
        with torch.set_grad_enabled(wanted):
            found.update(student(batch, partial(divergence, teacher=states, mixture=mixture)))
        # Nothing of the student's graph may pass through the teacher's engine, which would hook it.
        return {}

    with torch.no_grad():
        teacher(batch, run_student)
    return found


def divergence(
    hidden: Tensor, head: Head, batch: PackedBatch, *, teacher: Teacher, mixture: Mixture
) -> dict[str, Tensor]:
    """A readout of the student: `loss`, the scalar sum over the batch's N predictions of what
    `mixture` says, differentiable in hidden states, weight and bias. Without gradient, in float32
    [N]: `divergence` and `kl` (nats, at the temperature), `logprobs`, `entropy` and `correct` as in
    `token_logprobs`, and `agreement` (1 where both models' likeliest token is the same)."""
    loss, *rest = ChunkedDivergence.apply(
        hidden.index_select(0, batch.predict_from),
        head.weight,
        head.bias,
        batch.predict,
        head,
        teacher,
        mixture,
        torch.is_grad_enabled(),
    )
    return {"loss": loss, **dict(zip(READ, rest, strict=True))}


READ = ("divergence", "kl", "logprobs", "entropy", "correct", "agreement")
"""What is read off each prediction, without gradient."""


class ChunkedDivergence(torch.autograd.Function):
    """The sum over predictions, and its gradient in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        teacher: Teacher,
        mixture: Mixture,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        read = hidden.new_empty(len(READ), len(hidden), dtype=torch.float32)
        needed = [wanted and needs for needs in ctx.needs_input_grad[:3]]
        gradients = Gradients(hidden, weight, bias, needed, mixture.chunk)
        for start in range(0, len(hidden), mixture.chunk):
            rows = slice(start, start + mixture.chunk)
            logits, bend = capped_logits(hidden[rows], weight, bias, head.scale, head.softcap)
            read[:, rows], change = compare(logits, targets[rows], teacher, rows, mixture)
            if any(needed):
                change.mul_(head.scale)
                gradients.add(rows, change if bend is None else change.mul_(bend))
        ctx.save_for_backward(*gradients.total())
        parts = read.unbind()
        ctx.mark_non_differentiable(*parts)
        return _total(read, mixture), *parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if item is None else item * gradient for item in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def compare(
    logits: Tensor, targets: Tensor, teacher: Teacher, rows: slice, mixture: Mixture
) -> tuple[Tensor, Tensor]:
    """What is read off a chunk [6, n], and the derivative of its loss by its logits [n, V]."""
    temperature, nll = mixture.temperature, mixture.nll
    plain = logits.log_softmax(-1)
    soft = plain if temperature == 1.0 else (logits / temperature).log_softmax(-1)
    found = teacher.compare(rows, soft, mixture.measure, temperature)
    places = targets[:, None]
    likeliest = plain.argmax(-1)
    probabilities = plain.exp()
    read = torch.stack(
        (
            found.divergence,
            found.kl,
            plain.gather(-1, places).squeeze(-1),
            -(probabilities * plain).sum(-1),
            (likeliest == targets).float(),
            (likeliest == found.likeliest).float(),
        )
    )
    # Through the softmax; of the temperature's square one factor is left, the other is the logits'.
    pull = found.slope
    soft_probabilities = probabilities if soft is plain else soft.exp()
    change = pull - soft_probabilities * pull.sum(-1, keepdim=True)
    change.mul_((1 - nll) * temperature)
    if nll:
        change.add_(probabilities, alpha=nll)
        change.scatter_add_(-1, places, torch.full_like(places, -nll, dtype=change.dtype))
    return read, change


def _total(read: Tensor, mixture: Mixture) -> Tensor:
    divergence, _, logprobs, *_ = read
    square = mixture.temperature**2
    return (1 - mixture.nll) * square * divergence.sum() - mixture.nll * logprobs.sum()


class Gradients:
    """The gradients for hidden states, weight and bias, as far as they are needed."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: list[bool],
        chunk: int,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        needs_hidden, needs_weight, needs_bias = needed
        self._for_hidden = torch.zeros_like(hidden) if needs_hidden else None
        self._for_weight = Sums(weight, chunks=-(-len(hidden) // chunk)) if needs_weight else None
        self._for_bias = None
        if needs_bias and bias is not None:
            self._for_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, change: Tensor) -> None:
        """Add a chunk's derivative by what the head's product gives [n, V]."""
        if self._for_bias is not None:
            self._for_bias += change.sum(0)
        change = change.to(self._hidden.dtype)
        if self._for_hidden is not None:
            self._for_hidden[rows] = change @ self._weight
        if self._for_weight is not None:
            self._for_weight.add(change.T @ self._hidden[rows])

    def total(self) -> tuple[Tensor | None, ...]:
        """The three gradients, None where none is needed."""
        weight = None if self._for_weight is None else self._for_weight.total()
        bias = None
        if self._for_bias is not None and self._bias is not None:
            bias = self._for_bias.to(self._bias.dtype)
        return self._for_hidden, weight, bias
