"""The Triton kernel of a `SkewedKL` from a whole teacher: logits of both models are read twice, or
three times with a skew, and the student's are overwritten once with their gradient.

Normalisers, both KL divergences and the entropy are updated block by block of a row, as in
`logits_triton.py`. With a model's logits x and z = log(sum(exp(x))), KL(p || q) of a teacher's p
and a student's q is the mean of x_p - x_q under p, less z_p - z_q.
"""

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_kernels.logits_triton import COLUMNS, WARPS, logit_value


class SkewedKL(Protocol):
    """The numbers of `rlhf_distill.SkewedKL`."""

    forward: float
    reverse: float
    forward_skew: float
    reverse_skew: float


def compare_rows(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    weights: Tensor,
    measure: SkewedKL,
    *,
    temperature: float,
    nll: float,
    scales: tuple[float, float],
    softcaps: tuple[float | None, float | None],
    with_gradient: bool,
) -> Tensor:
    """Return divergence, KL(teacher || student), log-probability of the target, entropy, and
    whether the target and the teacher's most likely token are the student's: [6, n] in float32, of
    raw logits [n, V] of both models.

    `with_gradient` overwrites the student's logits with the derivative of the loss, which is that
    of `Mixture` times a row's weight. `scales` and `softcaps` are the student's and the teacher's.
    """
    assert student.shape == teacher.shape
    rows, vocabulary = student.shape
    output = torch.empty(6, rows, dtype=torch.float32, device=student.device)
    if rows:
        _compare[(rows,)](
            student, teacher, targets, weights, output, student.stride(0), teacher.stride(0), rows,
            1 / temperature, *scales, *(cap or 1.0 for cap in softcaps), nll,
            measure.forward, measure.reverse, measure.forward_skew, measure.reverse_skew,
            *(log_shares(measure.forward_skew)), *(log_shares(measure.reverse_skew)),
            VOCABULARY=vocabulary, CAPPED=softcaps[0] is not None,
            TEACHER_CAPPED=softcaps[1] is not None, SOFT=temperature != 1,
            FORWARD=measure.forward != 0, REVERSE=measure.reverse != 0,
            FORWARD_SKEWED=measure.forward * measure.forward_skew != 0,
            REVERSE_SKEWED=measure.reverse * measure.reverse_skew != 0,
            NLL=nll != 0, GRADIENT=with_gradient, BLOCK=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return output


def log_shares(skew: float) -> tuple[float, float]:
    """Return the logarithms of a share and of the rest; without a skew nothing reads them."""
    return (math.log(skew), math.log1p(-skew)) if skew else (0.0, 0.0)


@triton.jit
def _mixed(one, other, log_share, log_rest):
    one, other = one + log_share, other + log_rest
    return tl.maximum(one, other) + tl.log(1 + tl.exp(-tl.abs(one - other)))


@triton.jit
def _terms(
    lq, lp, measure,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    FORWARD_SKEWED: tl.constexpr, REVERSE_SKEWED: tl.constexpr,
):  # fmt: skip
    """Return each token's part of the divergence, and the derivative by its log q."""
    forward, reverse, forward_skew, reverse_skew, logs = measure
    log_forward, log_no_forward, log_reverse, log_no_reverse = logs
    value = tl.zeros_like(lq)
    derivative = tl.zeros_like(lq)
    if FORWARD:
        p = tl.exp(lp)
        middle, shared = lq, p
        if FORWARD_SKEWED:
            middle = _mixed(lp, lq, log_forward, log_no_forward)
            shared = (1 - forward_skew) * tl.exp(lp + lq - middle)
        value += forward * p * (lp - middle)
        derivative -= forward * shared
    if REVERSE:
        q = tl.exp(lq)
        ratio = lq - lp
        slope = ratio + 1
        if REVERSE_SKEWED:
            ratio = lq - _mixed(lq, lp, log_reverse, log_no_reverse)
            slope = ratio + 1 - reverse_skew * tl.exp(ratio)
        value += reverse * q * ratio
        derivative += reverse * q * slope
    return value, derivative


@triton.jit
def _block(
    student, teacher, first, scales,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the places of a block of a row, whether they are in it, the student's logits there and
    the teacher's at the run's temperature."""
    inverse, scale, teacher_scale, cap, teacher_cap = scales
    place = first + tl.arange(0, BLOCK)
    inside = place < VOCABULARY
    x = tl.load(student + place, mask=inside, other=0.0)
    t = tl.load(teacher + place, mask=inside, other=0.0)
    x = logit_value(x, scale, cap, CAPPED)
    t = logit_value(t, teacher_scale, teacher_cap, TEACHER_CAPPED) * inverse
    return place, inside, x, t


@triton.jit
def _sums(
    student, teacher, scales,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return of a row the student's normaliser and entropy at temperature 1; at the run's
    temperature both normalisers, KL(p || q) and KL(q || p); and both models' most likely tokens."""
    inverse = scales[0]
    # Largest logits begin finite, since the difference of two infinities is NaN.
    # Of the student at temperature 1: largest logit, sum of exponentials, entropy's sum.
    most, likely, total, tilted = -1e30, VOCABULARY, 0.0, 0.0
    # At the run's temperature: sums of exponentials, and the two KL divergences' sums.
    soft_total, of_student = 0.0, 0.0
    known_most, known_likely, known_total, of_teacher = -1e30, VOCABULARY, 0.0, 0.0
    for first in range(0, VOCABULARY, BLOCK):
        place, inside, x, t = _block(
            student, teacher, first, scales, VOCABULARY, CAPPED, TEACHER_CAPPED, BLOCK
        )
        apart = tl.where(inside, x * inverse - t, 0.0)
        x, t = tl.where(inside, x, -1e30), tl.where(inside, t, -1e30)

        here = tl.max(x, 0)
        nearest = tl.min(tl.where(x == here, place, VOCABULARY), 0)
        likely = tl.where(here > most, nearest, likely)
        new = tl.maximum(most, here)
        shrunk = tl.exp(most - new)
        exponential = tl.exp(x - new)
        tilted = (tilted + total * (most - new)) * shrunk
        tilted += tl.sum(exponential * (x - new), 0)
        total = total * shrunk + tl.sum(exponential, 0)
        if SOFT:
            shrunk = tl.exp((most - new) * inverse)
            exponential = tl.exp((x - new) * inverse)
        soft_total = soft_total * shrunk + tl.sum(exponential, 0)
        of_student = of_student * shrunk + tl.sum(exponential * apart, 0)
        most = new

        here = tl.max(t, 0)
        nearest = tl.min(tl.where(t == here, place, VOCABULARY), 0)
        known_likely = tl.where(here > known_most, nearest, known_likely)
        new = tl.maximum(known_most, here)
        shrunk = tl.exp(known_most - new)
        exponential = tl.exp(t - new)
        known_total = known_total * shrunk + tl.sum(exponential, 0)
        of_teacher = of_teacher * shrunk - tl.sum(exponential * apart, 0)
        known_most = new
    entropy = tl.log(total) - tilted / total
    soft = tl.log(soft_total) + most * inverse
    known = tl.log(known_total) + known_most
    kl = of_teacher / known_total - known + soft
    reverse_kl = of_student / soft_total - soft + known
    return tl.log(total) + most, entropy, soft, known, kl, reverse_kl, likely, known_likely


@triton.jit
def _skewed(
    student, teacher, soft, known, measure, scales,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    FORWARD_SKEWED: tl.constexpr, REVERSE_SKEWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the divergence of a row, and the sum of its derivatives by the tokens' log q."""
    inverse = scales[0]
    value, slopes = 0.0, 0.0
    for first in range(0, VOCABULARY, BLOCK):
        _, inside, x, t = _block(
            student, teacher, first, scales, VOCABULARY, CAPPED, TEACHER_CAPPED, BLOCK
        )
        values, derivatives = _terms(
            x * inverse - soft, t - known, measure, FORWARD, REVERSE, FORWARD_SKEWED, REVERSE_SKEWED
        )
        value += tl.sum(tl.where(inside, values, 0.0), 0)
        slopes += tl.sum(tl.where(inside, derivatives, 0.0), 0)
    return value, slopes


@triton.jit
def _gradient_(
    student, teacher, target, weight, normaliser, soft, known, slopes, nll, measure, scales,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    FORWARD_SKEWED: tl.constexpr, REVERSE_SKEWED: tl.constexpr,
    NLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the student's logits of a row with the derivative of the loss."""
    # Through the softmax: d/dz_i = g_i - q_i * sum(g). Of the loss's factor temperature^2 one
    # cancels against the division of the logits by the temperature.
    inverse, scale, cap = scales[0], scales[1], scales[3]
    factor = weight * (1 - nll) / inverse
    for first in range(0, VOCABULARY, BLOCK):
        place, inside, x, t = _block(
            student, teacher, first, scales, VOCABULARY, CAPPED, TEACHER_CAPPED, BLOCK
        )
        lq = x * inverse - soft
        _, change = _terms(lq, t - known, measure, FORWARD, REVERSE, FORWARD_SKEWED, REVERSE_SKEWED)
        change = (change - tl.exp(lq) * slopes) * factor
        if NLL:
            missed = tl.exp(x - normaliser) - tl.where(place == target, 1.0, 0.0)
            change += weight * nll * missed
        change *= scale
        if CAPPED:
            change *= 1 - (x / cap) * (x / cap)
        tl.store(student + place, change.to(student.dtype.element_ty), mask=inside)


@triton.jit
def _compare(
    student, teacher, targets, weights, output, stride, teacher_stride, rows,
    inverse, scale, teacher_scale, cap, teacher_cap, nll,
    forward, reverse, forward_skew, reverse_skew,
    log_forward, log_no_forward, log_reverse, log_no_reverse,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    SOFT: tl.constexpr, FORWARD: tl.constexpr, REVERSE: tl.constexpr,
    FORWARD_SKEWED: tl.constexpr, REVERSE_SKEWED: tl.constexpr,
    NLL: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The inverse of the temperature, and both models' scales and soft caps.
    scales = inverse, scale, teacher_scale, cap, teacher_cap
    logs = log_forward, log_no_forward, log_reverse, log_no_reverse
    measure = forward, reverse, forward_skew, reverse_skew, logs
    row = tl.program_id(0).to(tl.int64)
    student, teacher = student + row * stride, teacher + row * teacher_stride
    target = tl.load(targets + row)
    # Before the gradient overwrites it.
    at = logit_value(tl.load(student + target), scale, cap, CAPPED)
    normaliser, entropy, soft, known, kl, reverse_kl, likely, known_likely = _sums(
        student, teacher, scales, VOCABULARY, CAPPED, TEACHER_CAPPED, SOFT, BLOCK
    )
    if FORWARD_SKEWED or REVERSE_SKEWED:
        value, slopes = _skewed(
            student, teacher, soft, known, measure, scales, VOCABULARY, CAPPED, TEACHER_CAPPED,
            FORWARD, REVERSE, FORWARD_SKEWED, REVERSE_SKEWED, BLOCK,
        )  # fmt: skip
    else:
        value, slopes = 0.0, 0.0
        if FORWARD:
            value += forward * kl
            slopes -= forward
        if REVERSE:
            value += reverse * reverse_kl
            slopes += reverse * (reverse_kl + 1)

    tl.store(output + row, value)
    tl.store(output + rows + row, kl)
    tl.store(output + 2 * rows + row, at - normaliser)
    tl.store(output + 3 * rows + row, entropy)
    tl.store(output + 4 * rows + row, (likely == target).to(tl.float32))
    tl.store(output + 5 * rows + row, (likely == known_likely).to(tl.float32))
    if GRADIENT:
        _gradient_(
            student, teacher, target, tl.load(weights + row), normaliser, soft, known, slopes, nll,
            measure, scales, VOCABULARY, CAPPED, TEACHER_CAPPED,
            FORWARD, REVERSE, FORWARD_SKEWED, REVERSE_SKEWED, NLL, BLOCK,
        )  # fmt: skip
