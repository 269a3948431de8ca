"""Whether a phase between steps fits its accelerator with all states of the engines on it."""

from typing import Literal

from rlhf.engine import gib
from rlhf.memory.fit import MARGIN, StepFit
from rlhf.memory.rehearsal import Rehearsed
from rlhf.reference.compute import NO_GRADIENT_FACTOR

Phase = Literal["evaluation", "caching", "generation"]


def shortage(fit: StepFit, phase: Phase) -> str:
    """Return why `phase` does not fit the accelerator, or "" where it fits or nothing is known."""
    memory = fit.mesh.memory
    if not memory or fit.mesh.device.type == "cpu":
        return ""
    size = phase_peak(fit, phase)
    return f"it would take {gib(size)} of {gib(memory)} GiB" if size > MARGIN * memory else ""


def phase_peak(fit: StepFit, phase: Phase) -> int:
    """Return the bytes at the peak of a phase with all states on the accelerator; 0 if they are not
    known.

    Gradients are released between steps. A forward without gradient takes at most what a step takes
    without its activations. Answers add keys and values for the tokens of a micro-batch, at most
    two hidden states per layer and token.
    """
    estimate, rehearsed = fit.estimate, fit.rehearsed
    if estimate is None or not isinstance(rehearsed, Rehearsed):
        return 0
    forward = estimate.step.peak - estimate.step.activations
    if phase == "caching":
        forward *= NO_GRADIENT_FACTOR
    if phase == "generation":
        shape, size = rehearsed.policy.shape, 4 if fit.config.model.dtype == "fp32" else 2
        forward += 2 * shape.layers * shape.hidden * estimate.tokens * size
    return estimate.resident - estimate.gradients + forward
