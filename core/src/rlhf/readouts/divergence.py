"""How far a student's distribution is from its teacher's, by chunks of predictions: of neither is
there a tensor of tokens times vocabulary.

The gradient is computed with the value, chunk by chunk, and only scaled in backward: the teacher's
head is then no longer needed, which ZeRO-3 has given back by that time. It also saves computing
both models' logits a second time. The price is that only the sum over predictions has a gradient.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

from rlhf.config.field_docs import documented
from rlhf.data.batch import PackedBatch
from rlhf.engine import Engine, fused_on
from rlhf.model.head import Head
from rlhf.readouts import logits as chunks
from rlhf.readouts.logprobs import Gradients, predictions, scaled_by

CHUNK = 1024
"""Predictions whose logits exist at the same time without fused kernels: 0.6 GiB in float32 at a
vocabulary of 152k, for each of about six such tensors."""

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`measure(student, teacher)`: of two sets of log-probabilities [n, M] the divergence [n], and its
derivative by each of the student's log-probabilities as if they were free of one another [n, M]."""


Against = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""`against(student, *chunk, measure=, temperature=)`: of a student's log-probabilities [n, V] and
what a teacher gives for a chunk of n predictions: the divergence [n]; KL(teacher || student) [n], a
yardstick that is the same for every measure; the derivative of the divergence by the student's
log-probabilities [n, V]; the teacher's likeliest token [n]."""


class Teacher(Protocol):
    """What is known of a teacher's distribution at the N predictions of a batch."""

    @property
    def against(self) -> Against:
        """How a student is compared with it: a function of tensors alone, so that it compiles."""

    def chunk(self, rows: slice) -> tuple[Tensor, ...]:
        """What `against` needs of the predictions `rows`; for rows from N on anything will do."""


@documented
@frozen
class WholeTeacher:
    """A teacher's hidden states and its head: the whole vocabulary."""

    hidden: Tensor
    """Hidden states of the teacher [N, H]."""
    head: Head
    """Head of the teacher."""

    @property
    def against(self) -> Against:
        """See `Teacher`."""
        return partial(_against_whole, scale=self.head.scale, softcap=self.head.softcap)

    def chunk(self, rows: slice) -> tuple[Tensor, ...]:
        """See `Teacher`: raw logits [n, V]."""
        hidden = chunks.pad_rows(self.hidden[rows], rows.stop - rows.start)
        return (torch.nn.functional.linear(hidden, self.head.weight, self.head.bias),)


def _against_whole(
    student: Tensor,
    raw: Tensor,
    *,
    scale: float,
    softcap: float | None,
    measure: Measure,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = chunks.capped(chunks.scaled(raw, scale), softcap)
    teacher = (values / temperature).log_softmax(-1)
    divergence, slope = measure(student, teacher)
    return divergence, forward_kl(student, teacher), slope, teacher.argmax(-1)


@frozen
class TopTeacher:
    """A teacher's k likeliest tokens, and the mass of all others as one outcome more."""

    tokens: Tensor
    """Token ids, the likeliest first [N, k]."""
    logprobs: Tensor
    """Their log-probabilities at the run's temperature, then that of all others together
    [N, k + 1], float32."""

    @property
    def against(self) -> Against:
        """See `Teacher`; the student's distribution is taken over the same k + 1 outcomes."""
        return _against_top

    def chunk(self, rows: slice) -> tuple[Tensor, ...]:
        """See `Teacher`: tokens [n, k], log-probabilities [n, k + 1]."""
        parts = self.tokens[rows], self.logprobs[rows]
        return tuple(chunks.pad_rows(part, rows.stop - rows.start) for part in parts)


def _against_top(
    student: Tensor, tokens: Tensor, teacher: Tensor, *, measure: Measure, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = student.scatter(-1, tokens, -torch.inf)
    tail = others.logsumexp(-1, keepdim=True)
    own = torch.cat([student.gather(-1, tokens), tail], dim=-1)
    divergence, pull = measure(own, teacher)
    # The tail's log-probability moves with each token's by that token's share of the tail.
    slope = (others - tail).exp() * pull[:, -1:]
    slope = slope.scatter(-1, tokens, pull[:, :-1])
    return divergence, forward_kl(own, teacher), slope, tokens[:, 0]


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of log-probabilities [n, M] -> [n]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


@documented
@frozen
class Mixture:
    """What is minimised: (1 - nll) * temperature^2 * divergence + nll * negative log-likelihood."""

    measure: Measure
    """The divergence, with its derivative."""
    temperature: float = 1.0
    """Divides both models' logits. The square keeps gradients of the same size (Hinton et al.,
    arXiv 1503.02531, section 2)."""
    nll: float = 0.0
    """Share of the negative log-likelihood of the predicted token, at temperature 1."""
    chunk: int | None = None
    """Predictions that are compared at the same time; default by vocabulary and device."""


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
    states, targets = predictions(hidden, batch)
    loss, *rest = ChunkedDivergence.apply(
        states,
        head.weight,
        head.bias,
        targets,
        head,
        teacher,
        mixture,
        len(batch.predict),
        torch.is_grad_enabled(),
    )
    return {"loss": loss, **dict(zip(READ, rest, strict=True))}


READ = ("divergence", "kl", "logprobs", "entropy", "correct", "agreement")
"""What is read off each prediction, without gradient."""


class ChunkedDivergence(torch.autograd.Function):
    """The sum over the first `count` predictions, and its gradient in the same pass."""

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
        count: int,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        chunk = mixture.chunk or rows_at_once(weight)
        read = hidden.new_empty(len(READ), len(hidden), dtype=torch.float32)
        needed = [wanted and needs for needs in ctx.needs_input_grad[:3]]
        gradients = Gradients(hidden, weight, bias, needed, chunk, unscaled=True)
        against_teacher = fused_compare if fused_on(hidden.device.type) else compare

        def look(rows: slice, raw: Tensor) -> None:
            read[:, rows], change = against_teacher(
                raw, targets[rows], *teacher.chunk(rows), against=teacher.against,
                measure=mixture.measure, temperature=mixture.temperature, nll=mixture.nll,
                scale=head.scale, softcap=head.softcap, wanted=any(needed),
            )  # fmt: skip
            if any(needed):
                change[max(count - rows.start, 0) :] = 0
                gradients.add(rows, change)

        chunks.each_chunk(look, hidden, weight, bias, chunk)
        ctx.save_for_backward(*gradients.total())
        ctx.dtype = hidden.dtype
        read = read[:, :count]
        parts = read.unbind()
        ctx.mark_non_differentiable(*parts)
        return _total(read, mixture), *parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        unneeded = (None,) * 6
        return *scaled_by(gradient, ctx.saved_tensors, ctx.dtype), *unneeded


def compare(
    raw: Tensor,
    targets: Tensor,
    *chunk: Tensor,
    against: Against,
    measure: Measure,
    temperature: float,
    nll: float,
    scale: float,
    softcap: float | None,
    wanted: bool,
) -> tuple[Tensor, Tensor]:
    """What is read off a chunk [6, n], and the derivative of its loss by raw logits [n, V] in their
    dtype (empty where it is not `wanted`)."""
    logits = chunks.capped(chunks.scaled(raw, scale), softcap)
    plain = logits.log_softmax(-1)
    soft = plain if temperature == 1.0 else (logits / temperature).log_softmax(-1)
    found, kl, pull, teacher_likeliest = against(
        soft, *chunk, measure=measure, temperature=temperature
    )
    places = targets[:, None]
    likeliest = plain.argmax(-1)
    probabilities = plain.exp()
    read = torch.stack(
        (
            found,
            kl,
            plain.gather(-1, places).squeeze(-1),
            -(probabilities * plain).sum(-1),
            (likeliest == targets).float(),
            (likeliest == teacher_likeliest).float(),
        )
    )
    if not wanted:
        return read, raw.new_empty(0)
    # Through the softmax; of the temperature's square one factor is left, the other is the logits'.
    soft_probabilities = probabilities if temperature == 1.0 else soft.exp()
    change = (pull - soft_probabilities * pull.sum(-1, keepdim=True)) * ((1 - nll) * temperature)
    if nll:
        target = torch.arange(plain.shape[-1], device=raw.device) == places
        change = change + nll * (probabilities - target.float())
    if scale != 1.0:
        change = change * scale
    if softcap is not None:
        change = change * (1 - (logits / softcap).square())
    return read, change.to(raw.dtype)


def rows_at_once(weight: Tensor) -> int:
    """How many predictions of a student's head `weight` are compared at the same time."""
    fused = fused_on(weight.device.type)
    return chunks.rows_at_once(weight) if fused else CHUNK


def fused_compare(raw: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`compare` as a few fused kernels, compiled once for any number of predictions; without values
    what they take and give."""
    if raw.is_meta:
        read = raw.new_empty(len(READ), len(raw), dtype=torch.float32)
        return read, torch.empty_like(raw)
    for tensor in (raw, *tensors):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled_compare()(raw, *tensors, **options)


@cache
def _compiled_compare() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(compare)


def _total(read: Tensor, mixture: Mixture) -> Tensor:
    divergence, _, logprobs, *_ = read
    square = mixture.temperature**2
    return (1 - mixture.nll) * square * divergence.sum() - mixture.nll * logprobs.sum()
