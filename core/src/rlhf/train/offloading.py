"""Phases of a run in which states that they do not need are on the host."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from attrs import define, field

from rlhf.data.order import NO_GRADIENT_FACTOR
from rlhf.engine import Engine, Mesh, StateKind, gib
from rlhf.memory.fit import MARGIN, StepFit
from rlhf.memory.rehearsal import Rehearsed
from rlhf.model.role import POLICY, Role
from rlhf.registry.gateway import BackendGateway

Phase = Literal["evaluation", "caching", "generation"]
TRAINING: tuple[StateKind, ...] = ("optimizer", "masters", "gradients")
"""States that only a step needs."""


@define(eq=False)
class Phases:
    """Makes room for phases between steps, as the policy's plan says."""

    _roles: Mapping[str, Role]
    """The loaded models, at any time."""
    _mesh: Mesh
    _hooks: BackendGateway
    _fit: StepFit | None
    _reasons: dict[Phase, str] = field(factory=dict, init=False)
    """Why states are moved in a phase; "" where they stay."""
    _reported: set[Phase] = field(factory=set, init=False)
    _moved: dict[str, tuple[StateKind, ...]] = field(factory=dict, init=False)
    """The states of each role that are on the host for a phase."""

    @contextmanager
    def __call__(self, phase: Phase, running: Engine | None = None) -> Iterator[None]:
        """Run a phase in which no engine trains; with `running` only this one runs. A phase within
        another moves what is left. A line says so when states are first moved. Collective."""
        reason = self._reason(phase)
        idle = self._idle(running) if reason else {}
        size = sum(
            self._hooks.offload_states(engine=self._roles[role].engine, kinds=kinds)
            for role, kinds in idle.items()
        )
        before = self._moved
        # A phase in which nothing is idle keeps what the phase around it has moved.
        self._moved = {role: before.get(role, ()) + kinds for role, kinds in idle.items()} or before
        if size and phase not in self._reported and self._mesh.rank == 0:
            self._reported.add(phase)
            states = f"{gib(size)} GiB of states moved to the host"
            print(f"offload    {phase}: {states}, {reason}", flush=True)
        yield
        # Not after an error: the run ends, and there may be no room.
        for role, kinds in idle.items():
            self._hooks.reload_states(engine=self._roles[role].engine, kinds=kinds)
        self._moved = before

    def _reason(self, phase: Phase) -> str:
        """Return why states are moved in a phase, or "", the same on every rank."""
        if POLICY not in self._roles:
            return ""
        if phase not in self._reasons:
            mode = self._roles[POLICY].plan.offload_states
            reason = "as configured" if mode == "always" else ""
            if mode == "auto":
                # Ranks may see different amounts of device memory: rank 0 decides.
                fit = self._fit
                reason = self._mesh.on_rank_zero(lambda: shortage(fit, phase) if fit else "")
            self._reasons[phase] = reason
        return self._reasons[phase]

    def _idle(self, running: Engine | None) -> dict[str, tuple[StateKind, ...]]:
        """Return the kinds of states on the device that each role does not need."""
        idle: dict[str, tuple[StateKind, ...]] = {}
        for name, role in self._roles.items():
            runs, moved = running in (None, role.engine), self._moved.get(name, ())
            kinds = TRAINING if runs else (*TRAINING, "weights")
            idle[name] = tuple(kind for kind in kinds if kind not in moved)
        return idle


def shortage(fit: StepFit, phase: Phase) -> str:
    """Return why `phase` does not fit the accelerator, or "" where it fits or nothing is known."""
    memory = fit.mesh.memory
    if not memory or fit.mesh.device.type == "cpu":
        return ""
    size = phase_peak(fit, phase)
    if size <= MARGIN * memory:
        return ""
    return f"since it would take {gib(size)} of {gib(memory)} GiB"


def phase_peak(fit: StepFit, phase: Phase) -> int:
    """Return the bytes at the peak of a phase with all states on the accelerator; 0 if they are not
    known.

    Gradients are released between steps. A forward without gradient takes at most what a step takes
    without its activations, a survey what it takes in a step. Answers add keys and values, at most
    two hidden states per layer for each token of a micro-batch, and more only where memory is free.
    """
    estimate, rehearsed = fit.estimate, fit.rehearsed
    if estimate is None or not isinstance(rehearsed, Rehearsed):
        return 0
    forward = estimate.step_peak - estimate.step.activations
    if phase == "caching":
        forward *= NO_GRADIENT_FACTOR
    if phase == "generation":
        shape, size = rehearsed.policy.shape, 4 if fit.config.model.dtype == "fp32" else 2
        forward += 2 * shape.layers * shape.hidden * estimate.tokens * size
    if phase == "evaluation":
        forward = max(forward, estimate.step.survey)
    return estimate.resident - estimate.gradients + forward
