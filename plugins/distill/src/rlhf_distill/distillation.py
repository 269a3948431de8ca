"""The divergence of a student's distribution from its teacher's, by chunks of predictions: neither
model ever has a tensor of tokens times vocabulary.

The gradient is computed together with the value, chunk by chunk, and only scaled in backward. By
then ZeRO-3 has released the teacher's head, and the logits of both models need not be computed
twice. The price: only a sum over predictions has a gradient, with weights that are known before.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlhf.engine import Engine, Readout
from rlhf.errors import RLHFError
from rlhf.plugin import documented
from rlhf.readouts import Head, chunked_sum, kernel, pad_rows, transformed
from rlhf.trainer import PackedBatch, Reference
from rlhf_distill.distributions import Against, Measure, Teacher, WholeTeacher
from rlhf_distill.measures import SkewedKL

COMPARED_ROWS = 1024
"""Predictions whose logits exist at the same time without fused kernels: 0.6 GiB in float32 at a
vocabulary of 152k, for each of about six such tensors."""


@documented
@frozen
class Mixture:
    """The loss: (1 - nll) * temperature^2 * divergence + nll * negative log-likelihood."""

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
    student: Engine,
    teacher: Engine | Reference,
    batch: PackedBatch,
    mixture: Mixture,
    *,
    weights: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Return the `divergence` of the student from a teacher that runs in the same step. Collective
    at ZeRO-3."""
    read = partial(divergence, mixture=mixture, weights=weights)
    return beside(student, teacher, batch, read)


def beside(
    student: Engine, teacher: Engine | Reference, batch: PackedBatch, readout: Readout
) -> Mapping[str, Tensor]:
    """Return the student's `readout(hidden, head, batch, teacher=...)`, which gets the teacher's
    distribution as a `WholeTeacher`. Collective at ZeRO-3.

    The student's forward runs inside the teacher's, so that both heads exist at the same time at
    any stage. Only the student gets a gradient.

        teacher(batch, ...)                     no gradient; its layers, then its readout:
            student(batch, ...)                     with gradient; its layers, then its readout:
                readout(...)                            both heads are gathered here

    A reference that is the student itself with its adapter off runs before it; they share a head.
    """
    with_gradient, shared = torch.is_grad_enabled(), getattr(teacher, "engine", None) is student
    result: dict[str, Tensor] = {}
    states: list[Tensor] = []

    def run_student(hidden: Tensor, head: Head, batch: PackedBatch) -> dict[str, Tensor]:
        states.append(hidden.index_select(0, batch.predict_from))
        if not shared:
            known = WholeTeacher(states[0], head)
            with torch.set_grad_enabled(with_gradient):
                result.update(student(batch, partial(readout, teacher=known)))
        # An engine may put hooks on what its readout returns. The student's graph must not get the
        # teacher's, so its result leaves by `result`.
        return {}

    def read(hidden: Tensor, head: Head, batch: PackedBatch) -> Mapping[str, Tensor]:
        return readout(hidden, head, batch, teacher=WholeTeacher(states[0], head))

    with torch.no_grad():
        teacher(batch, run_student)
    return student(batch, read) if shared else result


def divergence(
    hidden: Tensor,
    head: Head,
    batch: PackedBatch,
    *,
    teacher: Teacher,
    mixture: Mixture,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Read the student's divergence from a teacher over the batch's N predictions.

    `loss` is the scalar sum of `mixture`'s loss, differentiable in hidden states, weight and bias;
    with `weights` [N], which get no gradient, each prediction's loss is multiplied by its own.
    Without gradient, in float32 [N]: `divergence` and `kl` (nats, at the temperature), `logprobs`,
    `entropy` and `correct` as in `token_logprobs`, and `agreement` (1 where both models' most
    likely token is the same). `kl` is KL(teacher || student).
    """
    fused, compiled = (kernel(name, hidden.device) for name in ("compare_rows", "for_any_rows"))
    compare_chunk = comparison(teacher, mixture, head, fused=fused, compiled=compiled)
    factors = torch.ones_like(batch.predict, dtype=torch.float32) if weights is None else weights
    factors = factors.detach().float()

    def read(
        rows: slice, raw: Tensor, targets: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        size = rows.stop - rows.start
        weights = pad_rows(factors[rows], size)
        return compare_chunk(
            raw, targets, weights, *teacher.chunk(rows), with_gradient=with_gradient
        )

    def total(values: Tensor) -> Tensor:
        divergence, _, logprobs, *_ = values
        square = mixture.temperature**2
        divergence, logprobs = factors * divergence, factors * logprobs
        return (1 - mixture.nll) * square * divergence.sum() - mixture.nll * logprobs.sum()

    loss, values = chunked_sum(
        read, total, hidden, head, batch,
        names=COMPARED, chunk=mixture.chunk or (COMPARED_ROWS if compiled is None else None),
    )  # fmt: skip
    return {"loss": loss, **values}


COMPARED = ("divergence", "kl", "logprobs", "entropy", "correct", "agreement")
"""What is read of each prediction, without gradient."""


Function = Callable[..., Any]


def comparison(
    teacher: Teacher,
    mixture: Mixture,
    head: Head,
    *,
    fused: Function | None,
    compiled: Function | None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what compares a chunk as `compare` does: the `fused` kernel for a `SkewedKL` from a
    whole teacher, and otherwise `compare`, `compiled` if that is possible. Raises RLHFError unless
    both heads have as many tokens, as they have in a run that calls `load_teacher`."""
    measure = mixture.measure
    if isinstance(teacher, WholeTeacher) and len(teacher.head.weight) != len(head.weight):
        raise RLHFError(
            f"the teacher's head has {len(teacher.head.weight)} tokens but the student's has "
            f"{len(head.weight)}; load the teacher with rlhf_distill.load_teacher, which compares "
            "tokenizers"
        )
    options: dict[str, Any] = {"temperature": mixture.temperature, "nll": mixture.nll}
    if fused and isinstance(teacher, WholeTeacher) and isinstance(measure, SkewedKL):
        return partial(
            compare_whole, fused, measure=measure, scales=(head.scale, teacher.head.scale),
            softcaps=(head.softcap, teacher.head.softcap), **options,
        )  # fmt: skip
    return partial(
        compare if compiled is None else partial(compiled_compare, compiled), measure=measure,
        against=teacher.against, scale=head.scale, softcap=head.softcap, **options,
    )  # fmt: skip


def compare_whole(
    fused: Function,
    raw: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return what `compare` returns. The derivative overwrites the raw logits."""
    return fused(raw, teacher, targets, weights, **options), raw


def compare(
    raw: Tensor,
    targets: Tensor,
    weights: Tensor,
    *chunk: Tensor,
    against: Against,
    measure: Measure,
    temperature: float,
    nll: float,
    scale: float,
    softcap: float | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return what is read of a chunk [6, n], and the derivative of its loss by raw logits [n, V] in
    their dtype, which is empty unless `with_gradient`."""
    logits = transformed(raw, scale, softcap)
    plain = logits.log_softmax(-1)
    soft = plain if temperature == 1.0 else (logits / temperature).log_softmax(-1)
    distance, kl, by_logprob, teacher_most_likely = against(
        soft, *chunk, measure=measure, temperature=temperature
    )
    places = targets[:, None]
    most_likely = plain.argmax(-1)
    probabilities = plain.exp()
    read = torch.stack(
        (
            distance,
            kl,
            plain.gather(-1, places).squeeze(-1),
            -(probabilities * plain).sum(-1),
            (most_likely == targets).float(),
            (most_likely == teacher_most_likely).float(),
        )
    )
    if not with_gradient:
        return read, raw.new_empty(0)
    # Through the softmax: d/dz_i = g_i - p_i * sum(g). Of the factor temperature^2 one cancels
    # against the division of the logits by the temperature.
    soft_probabilities = probabilities if temperature == 1.0 else soft.exp()
    gradient = (by_logprob - soft_probabilities * by_logprob.sum(-1, keepdim=True)) * (
        weights[:, None] * ((1 - nll) * temperature)
    )
    if nll:
        target = torch.arange(plain.shape[-1], device=raw.device) == places
        gradient = gradient + weights[:, None] * nll * (probabilities - target.float())
    return read, _by_raw(gradient, logits, scale=scale, softcap=softcap).to(raw.dtype)


def _by_raw(gradient: Tensor, logits: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Return the derivative by raw logits from the one by `logits`, scaled and capped [n, V]."""
    if scale != 1.0:
        gradient = gradient * scale
    if softcap is not None:
        # d/dx of softcap * tanh(x / softcap).
        gradient = gradient * (1 - (logits / softcap).square())
    return gradient


def compiled_compare(
    compiled: Function, raw: Tensor, *tensors: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return what `compare` returns, compiled once for any number of predictions. On the meta
    device nothing is computed."""
    if raw.is_meta:
        read = raw.new_empty(len(COMPARED), len(raw), dtype=torch.float32)
        return read, torch.empty_like(raw)
    result: tuple[Tensor, Tensor] = compiled(compare)(raw, *tensors, **options)
    return result
