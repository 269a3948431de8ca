"""Comparison of two runs of one configuration: their curves, and the tensors of their
checkpoints."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from rlhf.folder.checkpoints import MANIFEST, step_folder
from rlhf.folder.run_folder import logged
from rlhf.train.fragments import STEP, WEIGHT, SavedEngine

STEPS = 2
GRADIENT = "exp_avg"
"""The first state of every optimizer: after one step the clipped gradient, up to a factor."""


@frozen(kw_only=True)
class Bounds:
    """The largest differences that rounding explains, all relative."""

    loss: float
    """Absolute if the loss is below 1."""
    norm: float
    """Of the norm of the whole gradient."""
    gradient: float
    """Of the gradient of one parameter: the root mean square of its difference."""
    floor: float
    """A gradient smaller than this share of the root mean square of all counts as so large: where
    it is zero in exact arithmetic, only rounding is left."""


COARSE = Bounds(loss=1e-2, norm=5e-2, gradient=0.1, floor=0.1)
BOUNDS = {
    "fp32": Bounds(loss=1e-5, norm=1e-4, gradient=1e-4, floor=1e-2),
    "bf16": COARSE,
    "fp16": COARSE,
}
"""By `model.dtype`. Measured on the demos: in fp32 loss 1e-7 and gradient 1e-6, in bf16 2e-3 and
2e-2."""
UPDATE = 0.01
"""The largest difference of a weight whose gradient is not small, relative to the learning rate."""


def losses(run: Path) -> list[float]:
    """Return the losses of a run's steps."""
    return [line["loss"] for line in logged(run, until=STEPS)]


def largest_difference(run: Path, reference: Path) -> float:
    """Return the largest difference of two runs' losses."""
    return max(map(_relative, losses(run), losses(reference)))


def first_difference(
    run: Path, reference: Path, bounds: Bounds, *, weights: bool, steps: range = range(STEPS)
) -> str:
    """Return the first step in which two runs differ by more than rounding, with the tensor that
    differs most; "" if there is none. With `weights` the weights after a step are compared too."""
    for step in steps:
        here, there = logged(run, until=STEPS)[step], logged(reference, until=STEPS)[step]
        differences = [
            f"{name} is {here[name]:.8g} instead of {there[name]:.8g}"
            for name, bound, least in (("loss", bounds.loss, 1.0), ("grad_norm", bounds.norm, 1e-8))
            if not _relative(here[name], there[name], least) <= bound
        ]
        # After the first step weights differ slightly: Adam makes noise of tiny gradients.
        if differences or step == steps[0]:
            rate = here["learning_rate"] if weights else 0.0
            differing = _differing(run, reference, step + 1, bounds, rate=rate)
            # By clipping and by the loss a wrong gradient changes others, but less.
            differences[:0] = [text for _, text in sorted(differing, reverse=True)[:1]]
        if differences:
            return f"step {step + 1}: {'; '.join(differences)}"
    return ""


def first_changed(run: Path, reference: Path) -> str:
    """Return the first tensor, or else the first file, of the last checkpoints of two runs that is
    not the same to the last bit; "" if there is none."""
    folders = [step_folder(folder / "checkpoints", STEPS) for folder in (run, reference)]
    files, expected = (
        json.loads((each / MANIFEST).read_text(encoding="utf-8"))["files"] for each in folders
    )
    changed = [name for name in {**files, **expected} if files.get(name) != expected.get(name)]
    if not changed:
        return ""
    for role in sorted(path.name for path in folders[0].iterdir() if path.is_dir()):
        here, there = (SavedEngine(folder / role) for folder in folders)
        for name in here.shapes:
            # A changed weight is named rather than the optimizer's state of it.
            kinds = sorted({*here.kinds(name)} - {STEP}, key=lambda kind: (kind != WEIGHT, kind))
            for kind in kinds:
                if not here.whole(name, kind).equal(there.whole(name, kind)):
                    return f"step {STEPS}: {_called(name, kind)} of the {role}"
    return f"step {STEPS}: {changed[0]}"


def _differing(
    run: Path, reference: Path, step: int, bounds: Bounds, *, rate: float
) -> Iterator[tuple[float, str]]:
    """Yield the tensors of the policies that differ after a step, each after its difference divided
    by its bound. Weights are compared if `rate` is not 0."""
    here, there = (
        SavedEngine(step_folder(folder / "checkpoints", step) / "policy")
        for folder in (run, reference)
    )
    trained = [name for name in there.shapes if GRADIENT in there.kinds(name)]
    sizes = [there.whole(name, GRADIENT).square().sum().item() for name in trained]
    count = sum(math.prod(there.shapes[name]) for name in trained)
    floor = bounds.floor * math.sqrt(sum(sizes) / max(count, 1)) or 1.0
    for name in trained:
        gradient = there.whole(name, GRADIENT)
        scale = max(_rms(gradient), floor)
        apart = _rms(here.whole(name, GRADIENT) - gradient) / scale
        if not apart <= bounds.gradient:
            yield (
                apart / bounds.gradient,
                f"{_called(name, GRADIENT)} differs by {apart:.2g} of its size, more than "
                f"{bounds.gradient:g}",
            )
        weight = there.whole(name, WEIGHT)
        moved = (here.whole(name, WEIGHT) - weight).abs()[gradient.abs() > scale]
        limit = UPDATE * rate + 4 * torch.finfo(torch.float32).eps * weight.abs().max().item()
        if rate and moved.numel() and not moved.max() <= limit:
            yield (
                moved.max().item() / limit,
                f"{_called(name, WEIGHT)} differs by {moved.max():.2g}, more than {limit:.2g}",
            )


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _called(name: str, kind: str) -> str:
    """Return what a user calls a tensor of a checkpoint."""
    words = {WEIGHT: "weight", GRADIENT: "gradient"}
    return f"the {words.get(kind, kind)} of {name}"


def _relative(value: float, expected: float, least: float = 1.0) -> float:
    """Return the difference relative to what is expected, or to `least` if that is more."""
    if value == expected or not (math.isfinite(value) or math.isfinite(expected)):
        return 0.0
    return abs(value - expected) / max(abs(expected), least)
