"""Whether a step fits its accelerator, and what to change if it does not."""

import re
from collections.abc import Sequence
from functools import cached_property

import attrs

from rlhf.config.sections import Config, Recompute
from rlhf.data.examples import Examples
from rlhf.engine import Mesh, gib
from rlhf.errors import RLHFError
from rlhf.memory.estimate import Estimate
from rlhf.memory.rehearsal import NotRehearsed, Rehearsal, Rehearsed, rehearse
from rlhf.model.kernels.layers import compiles
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Trainer

MARGIN = 0.95
"""Share of an accelerator's memory that tensors can have; allocator and kernels take the rest."""
LEVELS = {
    "selective": "the products of gated layers computed again in backward",
    "full": "every layer computed again in backward",
}
"""Levels of `model.recompute`, the cheaper ones first."""
TOKENS_STEP = 1024
"""A budget of tokens is advised in multiples of this."""


@attrs.define(frozen=True, slots=False)
class StepFit:
    """Whether a step of one run fits in device memory. `batch.tokens` must be a number."""

    trainer: Trainer
    config: Config
    mesh: Mesh
    hooks: BackendGateway
    steps: int
    longest: int
    examples: Sequence[Examples]

    @cached_property
    def rehearsed(self) -> Rehearsed | NotRehearsed:
        """A step without values."""
        run = Rehearsal(
            self.config, self.trainer.tokenizer, self.mesh, self.hooks, self.steps, self.longest,
            tuple(self.examples),
        )  # fmt: skip
        return rehearse(self.trainer, run)

    @property
    def estimate(self) -> Estimate | None:
        """What a step takes; None if that is not known."""
        return self.rehearsed.estimate if isinstance(self.rehearsed, Rehearsed) else None

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of a step; None if they are not known."""
        return None if self.estimate is None else self.estimate.peak

    def under(self, tokens: int, recompute: Recompute) -> "StepFit":
        """Return the fit of the same run with another `batch.tokens` and `model.recompute`."""
        if (tokens, recompute) == (self.config.batch.budget, self.config.model.recompute):
            return self
        batch = attrs.evolve(self.config.batch, tokens=tokens)
        model = attrs.evolve(self.config.model, recompute=recompute)
        return attrs.evolve(self, config=attrs.evolve(self.config, batch=batch, model=model))

    def levels(self) -> list[Recompute]:
        """Return the levels of recomputation that the model has; a compiler decides by itself what
        it keeps."""
        return ["full"] if compiles(self.config.model) else ["selective", "full"]

    def largest_example(self) -> int:
        """Return the tokens of the largest example, to train on or held out."""
        return max(int(part.lengths.max()) for part in self.examples)

    def line(self) -> str:
        """Return the line `memory` of the run's introduction."""
        if isinstance(self.rehearsed, NotRehearsed):
            details = " (details: errors/rehearsal.txt)" * bool(self.rehearsed.traceback)
            return f"memory     not estimated: {self.rehearsed.reason}{details}"
        estimate = self.rehearsed.estimate
        if not self.mesh.memory:
            return f"memory     {estimate}"
        fits = estimate.peak <= MARGIN * self.mesh.memory
        warning = "" if fits else "; this probably will not fit"
        return f"memory     {estimate}, of {gib(self.mesh.memory)} GiB{warning}"

    def error(self, cause: BaseException) -> RLHFError:
        """Return the error of a run whose accelerator ran out of memory."""
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(cause))
        where = f"out of memory on {self.mesh.device}"
        if self.mesh.memory:
            where += f", which has {gib(self.mesh.memory)} GiB"
        if wanted:
            where += f", when allocating {wanted.group(1)} more"
        if isinstance(self.rehearsed, NotRehearsed):
            recomputes = self.config.model.recompute == "full"
            more = "" if recomputes else " or set model.recompute to full"
            return RLHFError(f"{where}: lower batch.tokens{more}")
        expected = f"a step was estimated at {gib(self.rehearsed.estimate.peak)} GiB"
        advice = self._advice(self.rehearsed)
        return RLHFError(f"{where}; {expected}: {', or '.join(advice)}")

    def _advice(self, rehearsed: Rehearsed) -> list[str]:
        """Return what to change, the smallest change first, with what a step would then take."""
        estimate = rehearsed.estimate
        advice = []
        tokens = self._fewer_tokens(estimate)
        fewer = estimate.peak_with(tokens)
        if tokens and fewer < estimate.peak:
            advice.append(f"set batch.tokens to {tokens} (about {gib(fewer)} GiB)")
        lean = self.under(self.config.batch.budget, "full").peak
        if lean is not None and lean < estimate.peak:
            advice.append(f"set model.recompute to full (about {gib(lean)} GiB)")
        advice += [f"use {setting}" for setting in rehearsed.lighter]
        return advice or ["train with lora, or use a device with more memory"]

    def _fewer_tokens(self, estimate: Estimate) -> int:
        """Return a budget that fits and holds the largest example, or 0."""
        most = min(
            estimate.tokens_that_fit(int(MARGIN * self.mesh.memory)), 3 * estimate.tokens // 4
        )
        tokens = most // TOKENS_STEP * TOKENS_STEP or most
        return tokens if tokens >= self.largest_example() else 0
