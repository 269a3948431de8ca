"""Whether a step fits its accelerator."""

from collections.abc import Sequence
from functools import cached_property

import attrs

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config, Recompute
from rlhf.data.examples import Examples
from rlhf.engine import Layout, Mesh, gib
from rlhf.memory.estimate import Estimate
from rlhf.memory.rehearsal import NotRehearsed, Rehearsal, Rehearsed, rehearse
from rlhf.model.role import layouts_of
from rlhf.registry.gateway import BackendGateway
from rlhf.trainer import Trainer

MARGIN = 0.95
"""Share of an accelerator's memory that tensors can have; allocator and kernels take the rest
(benchmarks/RESULTS.md, Memory held by the allocator)."""
SCAN = 3
"""Layers with attention that the host launches in the time for one with a recurrent scan
(benchmarks/NOTES.md, Gated DeltaNet by flash-linear-attention)."""
ADDED = 2.3e8
"""Parameters of a layer whose gradients, also those of experts that a token does not pass, the
device adds up in the time that the host takes for it (benchmarks/NOTES.md, Mixtures of experts)."""
LEVELS = {
    "selective": "the products of gated layers computed again in backward",
    "full": "every layer computed again in backward",
}
"""Levels of `model.recompute`, the cheaper ones first."""


@documented
@attrs.define(frozen=True, slots=False)
class StepFit:
    """Whether a step of one run fits in device memory. `batch.tokens` must be a number."""

    trainer: Trainer
    """It has no models."""
    config: Config
    mesh: Mesh
    hooks: BackendGateway
    """The backend's."""
    steps: int
    """Optimizer steps of the whole schedule."""
    longest: int
    """Tokens of the longest path, also of those that a rollout may make."""
    largest: int
    """Tokens of the largest example, also of those that a rollout may make."""
    examples: Sequence[Examples]
    """The rows to train on, then the held-out ones if there are any."""
    layout: str = ""
    """Name of the layout; empty for the first that is configured."""

    @cached_property
    def _known(self) -> dict[tuple[int, Recompute], Rehearsed | NotRehearsed]:
        """Steps by tokens and recomputation; a layout does not change them."""
        return {}

    @property
    def rehearsed(self) -> Rehearsed | NotRehearsed:
        """A step without values."""
        if self.token_settings not in self._known:
            run = Rehearsal(
                config=self.config, tokenizer=self.trainer.tokenizer, mesh=self.mesh,
                hooks=self.hooks, steps=self.steps, longest=self.longest,
                examples=tuple(self.examples),
            )  # fmt: skip
            self._known[self.token_settings] = rehearse(self.trainer, run)
        return self._known[self.token_settings]

    @cached_property
    def layouts(self) -> Sequence[Layout]:
        """The ways in which the backend can run this configuration, the fastest first."""
        if isinstance(self.rehearsed, NotRehearsed):
            return ()
        layouts = layouts_of(self.hooks, self.config, self.mesh, self.rehearsed.policy.shape)
        return sorted(layouts, key=lambda layout: layout.cost)

    @property
    def chosen(self) -> Layout:
        """The layout of this fit, if a step could be rehearsed."""
        named = (layout for layout in self.layouts if layout.name == self.layout)
        return next(named, next(layout for layout in self.layouts if layout.configured))

    @cached_property
    def estimate(self) -> Estimate | None:
        """What a step takes; None if that is not known."""
        if isinstance(self.rehearsed, NotRehearsed):
            return None
        return self.rehearsed.estimate(self.chosen)

    @property
    def fits(self) -> bool:
        """Whether a step fits, if that is known."""
        return self.peak is not None and self.peak <= MARGIN * self.mesh.memory

    @property
    def resolved(self) -> Config:
        """The configuration with nothing left to choose, if a layout was chosen."""
        return self.chosen.config if self.layout else self.config

    @property
    def peak(self) -> int | None:
        """Bytes at the peak of a step; None if they are not known."""
        return None if self.estimate is None else self.estimate.peak

    def under(self, tokens: int, recompute: Recompute, layout: str = "") -> "StepFit":
        """Return the fit of the same run with other tokens, recomputation and layout."""
        layout = layout or self.layout
        if (*self.token_settings, self.layout) == (tokens, recompute, layout):
            return self
        batch = attrs.evolve(self.config.batch, tokens=tokens)
        model = attrs.evolve(self.config.model, recompute=recompute)
        return self.with_config(attrs.evolve(self.config, batch=batch, model=model), layout)

    def with_config(self, config: Config, layout: str) -> "StepFit":
        """Return the fit of the same run with other settings, which shares what was rehearsed."""
        other = attrs.evolve(self, config=config, layout=layout)
        vars(other)["_known"] = self._known
        return other

    def line(self) -> str:
        """Return the line `memory` of the run's introduction."""
        if isinstance(self.rehearsed, NotRehearsed):
            details = " (details: errors/rehearsal.txt)" if self.rehearsed.traceback else ""
            return f"memory     not estimated: {self.rehearsed.reason}{details}"
        estimate = self.estimate
        assert estimate is not None
        if not self.mesh.memory:
            return f"memory     {estimate}"
        warning = "" if self.fits else "; this probably will not fit: see `rlhf plan`"
        return f"memory     {estimate}, of {gib(self.mesh.memory)} GiB{warning}"

    @property
    def layer(self) -> int:
        """Parameters of a mean layer of the trained model that a token passes, for the time in
        which the host launches a layer with attention and the device adds up small gradients."""
        assert isinstance(self.rehearsed, Rehearsed)
        shape = self.rehearsed.policy.shape
        layers = max(shape.layers + shape.tower_layers, 1)
        passed = (shape.mean_layer * layers - shape.idle) // (layers + (SCAN - 1) * shape.scans)
        return int(passed / (1 + shape.mean_layer / ADDED))

    @property
    def token_settings(self) -> tuple[int, Recompute]:
        """`batch.tokens` and `model.recompute`."""
        return self.config.batch.budget, self.config.model.recompute
