"""A teacher's distribution: over all tokens, or over its most likely ones."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from rlhf.plugin import documented
from rlhf.readouts import Head, pad_rows, transformed
from rlhf.trainer import PackedBatch

TEACHER = "teacher"
"""The role of a teacher's engine, and the name of the per-token value that holds its k most likely
tokens: k token ids, their log-probabilities, and that of all other tokens together."""

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`measure(student, teacher)` of log-probabilities [n, M] -> the divergence [n], and its derivative
by each of the student's log-probabilities, treating them as independent [n, M]. On CUDA, a
kernel computes a `SkewedKL` from a whole teacher; every other measure is compiled by torch."""

Against = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""`against(student, *chunk, measure=, temperature=)`, for a student's log-probabilities [n, V] and
a teacher's `chunk` of n predictions. It returns the divergence [n]; KL(teacher || student) [n],
which is comparable between measures; the derivative of the divergence by the student's
log-probabilities [n, V]; the teacher's most likely token [n]."""


class Teacher(Protocol):
    """What is known of a teacher's distribution at the N predictions of a batch."""

    @property
    def against(self) -> Against:
        """The comparison with a student, as a function of tensors only, so that it compiles."""

    def chunk(self, rows: slice) -> tuple[Tensor, ...]:
        """Return what `against` needs of the predictions `rows`; rows from N on may hold
        anything."""


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
        hidden = pad_rows(self.hidden[rows], rows.stop - rows.start)
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
    teacher = (transformed(raw, scale, softcap) / temperature).log_softmax(-1)
    divergence, gradient = measure(student, teacher)
    return divergence, forward_kl(student, teacher), gradient, teacher.argmax(-1)


@documented
@frozen
class TopTeacher:
    """A teacher's k most likely tokens, with the mass of all others as one more outcome."""

    tokens: Tensor
    """Token ids, the most likely first [N, k]."""
    logprobs: Tensor
    """Their log-probabilities at the run's temperature, and last that of all others together
    [N, k + 1], float32."""

    @classmethod
    def of(cls, batch: PackedBatch, top: int) -> "TopTeacher":
        """Return the teacher at the predictions of a batch, in a run that called
        `load_teacher(run, ..., top=top)`."""
        values = batch.values[TEACHER].index_select(0, batch.predict_at)
        # The values of a batch without examples have no width.
        values = values.view(len(batch.predict), 2 * top + 1)
        return cls(values[:, :top].long(), values[:, top:])

    @property
    def against(self) -> Against:
        """See `Teacher`; the student's distribution is taken over the same k + 1 outcomes."""
        return _against_top

    def chunk(self, rows: slice) -> tuple[Tensor, ...]:
        """See `Teacher`: tokens [n, k], log-probabilities [n, k + 1]."""
        parts = self.tokens[rows], self.logprobs[rows]
        return tuple(pad_rows(part, rows.stop - rows.start) for part in parts)


def _against_top(
    student: Tensor, tokens: Tensor, teacher: Tensor, *, measure: Measure, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = student.scatter(-1, tokens, -torch.inf)
    tail = others.logsumexp(-1, keepdim=True)
    outcomes = torch.cat([student.gather(-1, tokens), tail], dim=-1)
    divergence, by_outcome = measure(outcomes, teacher)
    # d tail / d log p_i = p_i / p_tail: a token in the tail moves the tail's log-probability by its
    # share of the tail.
    gradient = (others - tail).exp() * by_outcome[:, -1:]
    gradient = gradient.scatter(-1, tokens, by_outcome[:, :-1])
    return divergence, forward_kl(outcomes, teacher), gradient, tokens[:, 0]


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of log-probabilities [n, M] -> [n]."""
    return (teacher.exp() * (teacher - student)).sum(-1)
