"""Whether a step fits its accelerator: told before the weights are read, and what to change when it
did not fit."""

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs

from rlhf.config.sections import Config
from rlhf.data.examples import Examples
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.gateway import BackendGateway
from rlhf.memory import Estimate, gib
from rlhf.model.compiled import compiles
from rlhf.model.weights import first_line
from rlhf.rehearsal import Rehearsed, rehearse
from rlhf.trainer import Trainer

MARGIN = 0.95
"""Share of an accelerator's memory that tensors can have; allocator and kernels take the rest."""
AMPLE = 0.8
"""Share of it up to which a larger budget of tokens is proposed."""
LEVELS = {
    "selective": "the products of gated layers computed again in backward",
    "full": "every layer computed again in backward",
    "offload": "every layer computed again in backward from inputs that wait on the host",
}
"""Of `model.recompute`, the cheaper first."""
ROUND = 1024
"""A budget of tokens is proposed in multiples of this."""


@attrs.define(frozen=True, slots=False)
class Headroom:
    """The question for one run."""

    trainer: Trainer
    config: Config
    mesh: Mesh
    hooks: BackendGateway
    steps: int
    longest: int
    examples: Sequence[Examples]

    def estimate(self) -> Estimate:
        """What a step takes."""
        return self._rehearsed.estimate

    def recomputation(self) -> tuple[str, str]:
        """The level that `model.recompute: auto` takes where a step would not fit without, and the
        line that says why; nothing where it fits, or where nothing would help."""
        known = self.mesh.memory and self.mesh.device.type != "cpu"
        if self.config.model.recompute != "auto" or not known:
            return "", ""
        whole = self._peak()
        if whole is None or whole <= MARGIN * self.mesh.memory:
            return "", ""
        chosen, least = "", whole
        for level in self._levels():
            peak = recomputing(self, level)._peak()
            if peak is not None and peak < least:
                chosen, least = level, peak
            if least <= MARGIN * self.mesh.memory:
                break
        if not chosen:
            return "", ""
        return chosen, (
            f"recompute  {chosen}: a step would take {gib(whole)} of {gib(self.mesh.memory)} GiB, "
            f"and {gib(least)} with {LEVELS[chosen]}"
        )

    def _levels(self) -> list[str]:
        """Of `LEVELS` those that there are; a compiler chooses by itself what it keeps."""
        only = ("full",) if compiles(self.config.model) else LEVELS
        return [level for level in LEVELS if level in only]

    def _peak(self) -> int | None:
        try:
            return self.estimate().peak
        except Exception:  # The models of others may do anything without values.
            return None

    def line(self) -> str:
        """The line `memory` of the run's introduction; it never ends a run."""
        try:
            estimate = self.estimate()
        except Exception as error:  # The models of others may do anything without values.
            return f"memory     not estimated: {type(error).__name__}: {first_line(error)}"
        if not self.mesh.memory:
            return f"memory     {estimate}"
        fits = estimate.peak <= MARGIN * self.mesh.memory
        warning = "" if fits else "; this will hardly fit"
        return f"memory     {estimate}, of {gib(self.mesh.memory)} GiB{warning}"

    def room(self) -> str:
        """The line that proposes a larger `batch.tokens`, in powers of two, where a rank takes a
        step in several micro-batches and fewer would fit; elsewhere nothing. It never ends a run
        either."""
        try:
            estimate = self.estimate()
        except Exception:  # As above.
            return ""
        given = tokens = self.config.batch.tokens
        step = self.examples[0].lengths.mean() * self.config.batch.size / self.mesh.world
        most = estimate.tokens_that_fit(int(AMPLE * self.mesh.memory))
        while tokens < step and 2 * tokens <= most:
            tokens *= 2
        if tokens == given or self.config.model.fp8 is not None:
            return ""  # Products in FP8 depend on the budget.
        batch = attrs.evolve(self.config.batch, tokens=tokens)
        peak = attrs.evolve(self, config=attrs.evolve(self.config, batch=batch))._peak()
        if peak is None or peak > AMPLE * self.mesh.memory:
            return ""
        few, many = math.ceil(step / tokens), math.ceil(step / given)
        return (
            f"room       batch.tokens {tokens} would fit, in {gib(peak)} GiB: a step in about "
            f"{few} micro-batch{'es' * (few > 1)} instead of {many}"
        )

    def error(self, cause: BaseException) -> RLHFError:
        """What to tell the user when the accelerator's memory did not suffice."""
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(cause))
        where = f"out of memory on {self.mesh.device}"
        if self.mesh.memory:
            where += f", which has {gib(self.mesh.memory)} GiB"
        if wanted:
            where += f", when {wanted.group(1)} more were wanted"
        level, _ = self.recomputation()
        asked = recomputing(self, level) if level else self
        try:
            found = asked._rehearsed
            advice = asked._advice(found)
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
        lean = recomputing(self, level).estimate().peak if level else estimate.peak
        if lean < estimate.peak:
            advice.append(f"set model.recompute to {level} (about {gib(lean)} GiB)")
        advice += [f"use {setting}" for setting in found.lighter]
        return advice or ["train with lora, or use a device with more memory"]

    def _leaner(self) -> str:
        """The level to advise: every layer again, then its inputs to the host, then none."""
        given = self.config.model.recompute
        if given not in ("full", "offload"):
            return "full"
        there = self.mesh.device.type != "cpu" and "offload" in self._levels()
        return "offload" if given == "full" and there else ""

    def _fewer_tokens(self, estimate: Estimate) -> int:
        """A budget that fits and holds the largest example, or 0."""
        most = min(
            estimate.tokens_that_fit(int(MARGIN * self.mesh.memory)), 3 * estimate.tokens // 4
        )
        tokens = most // ROUND * ROUND or most
        largest = max(int(part.lengths.max()) for part in self.examples)
        return tokens if tokens >= largest else 0

    @cached_property
    def _rehearsed(self) -> Rehearsed:
        return rehearse(
            self.trainer, self.config, self.mesh, self.hooks,
            steps=self.steps, longest=self.longest, examples=self.examples,
        )  # fmt: skip


def recomputing(asked: Headroom, level: Any) -> Headroom:
    """The same question with more computed again in backward."""
    model = attrs.evolve(asked.config.model, recompute=level)
    return attrs.evolve(asked, config=attrs.evolve(asked.config, model=model))
