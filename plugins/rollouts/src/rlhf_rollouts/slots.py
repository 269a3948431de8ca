"""Which answer is written in which row: rows whose answers have ended get waiting ones, and a
prompt is computed once for all its answers that begin together."""

from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from rlhf.engine import Axis
from rlhf.trainer import Sample
from rlhf_rollouts.decoder import Rows, Start

REFILL = 4
"""Waiting answers begin once a quarter of the rows is free: a forward over prompts takes about as
long as a step of all rows."""


@frozen(kw_only=True)
class Pace:
    """How often the host looks at the device."""

    check: int
    """Steps from one look to the next."""
    block: int
    """A step reads a multiple of this many keys, so that there are few shapes."""


def pace_of(device: torch.device) -> Pace:
    """Return the pace of a device. On a CPU a look costs nothing."""
    return Pace(check=1, block=32) if device.type == "cpu" else Pace(check=8, block=256)


@frozen
class Writing:
    """An answer that a row writes, by its index, and the step at which it began."""

    answer: int
    begun: int


@define(kw_only=True, eq=False)
class Slots:
    """Writes answers in the rows of a batch, in the order in which they come."""

    rows: Rows
    answers: Sequence[Start]
    budget: int
    """The most prompt tokens of a forward, with padding, unless it is one prompt."""
    alike: bool
    """Whether prompts must have the same length to be computed side by side."""
    pace: Pace
    pad: int
    together: Axis | None = None
    """Ranks whose forwards are collective: each runs as many as the others."""
    samples: dict[int, Sample] = field(factory=dict, init=False)
    """The answers that are complete, by index."""
    _waiting: list[int] = field(init=False)
    """Answers that have not begun, the next one last."""
    _writing: dict[int, Writing] = field(factory=dict, init=False)
    """What each row writes that is not free."""
    _filling: bool = field(default=False, init=False)
    """Whether free rows begin answers, until none is free."""
    _step: int = field(default=0, init=False)
    _looked: int = field(default=0, init=False)
    """The step of the last look at the device."""

    def __attrs_post_init__(self) -> None:
        self._waiting = list(reversed(range(len(self.answers))))

    def run(self) -> dict[int, Sample]:
        """Write all answers and return them by index. Collective if `together`."""
        forwards = 0
        while self._is_busy() or self.together is not None:
            if self._may_begin():
                self._begin()
            else:
                self._advance()
            forwards += 1
            if self.together is not None and forwards % self.pace.check == 0:
                busy = torch.tensor(self._is_busy(), dtype=torch.int32, device=self._device)
                if not self.together.max(busy):
                    break
        return self.samples

    @property
    def _device(self) -> torch.device:
        return self.rows.tokens.device

    def _is_busy(self) -> bool:
        return bool(self._waiting or self._writing)

    def _may_begin(self) -> bool:
        """Return whether the next forward is one over prompts."""
        size = len(self.rows.tokens)
        free = size - len(self._writing)
        if not free or not self._waiting:
            self._filling = False
        elif self._step == self._looked and free >= min(len(self._waiting), -(-size // REFILL)):
            self._filling = True
        return self._filling

    def _begin(self) -> None:
        """Compute the next prompts in one forward and begin their answers."""
        free = [row for row in range(len(self.rows.tokens)) if row not in self._writing]
        begun, prompts = self._next(len(free))
        sources = {prompt: number for number, prompt in enumerate(prompts)}
        del self._waiting[-len(begun) :]
        rows = free[: len(begun)]
        answers = [self.answers[answer] for answer in begun]
        cache = self.rows.forward.read(prompts, self.pad, self._device)
        self.rows.start(rows, answers, cache, [sources[prefix(answer)] for answer in answers])
        self._writing |= {
            row: Writing(answer, self._step) for row, answer in zip(rows, begun, strict=True)
        }

    def _next(self, most: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the waiting answers that begin together, at most `most`, and their different
        prompts."""
        begun: list[int] = []
        prompts: dict[tuple[int, ...], None] = {}
        for answer in reversed(self._waiting[-most:]):
            prompt = prefix(self.answers[answer])
            if prompts and prompt not in prompts:
                lengths = [len(one) for one in (*prompts, prompt)]
                is_alike = len(set(lengths)) == 1
                if (self.alike and not is_alike) or len(lengths) * max(lengths) > self.budget:
                    break
            prompts[prompt] = None
            begun.append(answer)
        return begun, list(prompts)

    def _advance(self) -> None:
        """Run a step of all rows, and look at the device if it is time or all are full."""
        writing = [(self.answers[one.answer], one.begun) for one in self._writing.values()]
        highest = max((len(a.prompt) - 1 - begun for a, begun in writing), default=-self._step)
        read = (highest + self._step) // self.pace.block + 1
        self.rows.step(min(read * self.pace.block, self.rows.length))
        self._step += 1
        full = max((begun + answer.room for answer, begun in writing), default=0)
        if self._step - self._looked >= self.pace.check or self._step >= full:
            self._look()

    def _look(self) -> None:
        """Keep the answers that are complete, and free their rows."""
        self._looked = self._step
        ended = self.rows.ended.tolist()
        rows = [row for row in self._writing if ended[row]]
        if not rows:
            return
        samples = self.rows.take(rows)
        for row, sample in zip(rows, samples, strict=True):
            self.samples[self._writing.pop(row).answer] = sample


def prefix(answer: Start) -> tuple[int, ...]:
    """Return a prompt without its last token, which the first step of an answer reads."""
    return tuple(answer.prompt[:-1])
