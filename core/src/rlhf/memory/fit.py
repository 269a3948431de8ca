"""Whether a step fits its accelerator: told before the weights are read, and what to change when it
did not fit."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from rlhf.config.sections import Config
from rlhf.data.examples import Examples
from rlhf.engine import Mesh, gib
from rlhf.errors import RLHFError, first_line
from rlhf.memory.estimate import Estimate
from rlhf.memory.rehearsal import Rehearsed, UnknownError, rehearse
from rlhf.model.kernels.compiled import compiles
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Trainer

MARGIN = 0.95
"""Share of an accelerator's memory that tensors can have; allocator and kernels take the rest."""
LEVELS = {
    "selective": "the products of gated layers computed again in backward",
    "full": "every layer computed again in backward",
    "offload": "every layer computed again in backward from inputs that wait on the host",
}
"""Of `model.recompute`, the cheaper first."""
ROUND = 1024
"""A budget of tokens is advised in multiples of this."""


@attrs.define(frozen=True, slots=False)
class Headroom:
    """The question for one run, whose `batch.tokens` is a number."""

    trainer: Trainer
    config: Config
    mesh: Mesh
    hooks: BackendGateway
    steps: int
    longest: int
    examples: Sequence[Examples]

    def estimate(self) -> Estimate:
        """What a step takes."""
        return self.rehearsed.estimate

    def peak(self) -> int | None:
        """Bytes at the peak of a step, None where they are not known."""
        try:
            return self.estimate().peak
        except Exception:  # The models of others may do anything without values.
            return None

    def under(self, *, tokens: int | None = None, recompute: Any = None) -> "Headroom":
        """The same question with other tokens at once, or with more computed again in backward."""
        batch, model = self.config.batch, self.config.model
        if tokens is not None:
            batch = attrs.evolve(batch, tokens=tokens)
        if recompute is not None:
            model = attrs.evolve(model, recompute=recompute)
        return attrs.evolve(self, config=attrs.evolve(self.config, batch=batch, model=model))

    def levels(self) -> list[str]:
        """Of `LEVELS` those that there are; a compiler chooses by itself what it keeps."""
        only = ("full",) if compiles(self.config.model) else LEVELS
        return [level for level in LEVELS if level in only]

    def largest_example(self) -> int:
        """Tokens of the largest one, to train on or held out."""
        return max(int(part.lengths.max()) for part in self.examples)

    def line(self) -> str:
        """The line `memory` of the run's introduction; it never ends a run."""
        try:
            estimate = self.estimate()
        except UnknownError as error:
            return f"memory     not estimated: {error}"
        except Exception as error:  # As above.
            return f"memory     not estimated: {type(error).__name__}: {first_line(error)}"
        if not self.mesh.memory:
            return f"memory     {estimate}"
        fits = estimate.peak <= MARGIN * self.mesh.memory
        warning = "" if fits else "; this will hardly fit"
        return f"memory     {estimate}, of {gib(self.mesh.memory)} GiB{warning}"

    def error(self, cause: BaseException) -> RLHFError:
        """What to tell the user when the accelerator's memory did not suffice."""
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(cause))
        where = f"out of memory on {self.mesh.device}"
        if self.mesh.memory:
            where += f", which has {gib(self.mesh.memory)} GiB"
        if wanted:
            where += f", when {wanted.group(1)} more were wanted"
        try:
            found = self.rehearsed
            advice = self._advice(found)
        except Exception:  # As above: then there are no numbers.
            level = self._leaner()
            more = f" or set model.recompute to {level}" if level else ""
            return RLHFError(f"{where}: lower batch.tokens{more}")
        expected = f"a step was estimated at {gib(found.estimate.peak)} GiB"
        return RLHFError(f"{where}; {expected}: {', or '.join(advice)}")

    def _advice(self, found: Rehearsed) -> list[str]:
        """What to change, the nearest first, with what a step would then take."""
        estimate = found.estimate
        advice = []
        tokens = self._fewer_tokens(estimate)
        fewer = estimate.peak_with(tokens)
        if tokens and fewer < estimate.peak:
            advice.append(f"set batch.tokens to {tokens} (about {gib(fewer)} GiB)")
        level = self._leaner()
        lean = self.under(recompute=level).estimate().peak if level else estimate.peak
        if lean < estimate.peak:
            advice.append(f"set model.recompute to {level} (about {gib(lean)} GiB)")
        advice += [f"use {setting}" for setting in found.lighter]
        return advice or ["train with lora, or use a device with more memory"]

    def _leaner(self) -> str:
        """The level to advise: every layer again, then its inputs to the host, then none."""
        given = self.config.model.recompute
        if given not in ("full", "offload"):
            return "full"
        there = self.mesh.device.type != "cpu" and "offload" in self.levels()
        return "offload" if given == "full" and there else ""

    def _fewer_tokens(self, estimate: Estimate) -> int:
        """A budget that fits and holds the largest example, or 0."""
        most = min(
            estimate.tokens_that_fit(int(MARGIN * self.mesh.memory)), 3 * estimate.tokens // 4
        )
        tokens = most // ROUND * ROUND or most
        return tokens if tokens >= self.largest_example() else 0

    @cached_property
    def rehearsed(self) -> Rehearsed:
        """A step without values."""
        return rehearse(
            self.trainer, self.config, self.mesh, self.hooks,
            steps=self.steps, longest=self.longest, examples=self.examples,
        )  # fmt: skip
