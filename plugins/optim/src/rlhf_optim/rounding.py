"""AdamW whose weights and moments are all bf16, with every result rounded stochastically.

Rounded to the nearest, an update below 1/512 of a weight is lost, and a second moment at beta 0.999
never falls. Rounded up with the probability of the remainder, the mean is right for a change of any
size (Zamirai et al., arXiv 2010.06192, section 4).
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhf.engine import fused_on

CHUNK = 1 << 24
"""Elements that are in float32 at the same time without the fused kernel."""


class RoundedAdamW(Optimizer):
    """AdamW (arXiv 1711.05101, algorithm 2) in float32 arithmetic over bf16 states.

    The random numbers depend only on `seed`, the step and the place: ranks that hold the same
    weights round them alike, and a resumed run continues as if it had not stopped.
    """

    def __init__(
        self, params: Iterable[Mapping[str, Any]], *, seed: int = 0, **settings: Any
    ) -> None:
        super().__init__([dict(group) for group in params], {"weight_decay": 0.0, **settings})
        self.seed = seed
        self.factor: Tensor | None = None
        """Scales the next step's gradients, a float32 scalar on their device; NaN moves nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for index, group in enumerate(self.param_groups):
            by_step: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._advanced(parameter)
                    tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                    by_step[state["step"]].append(tensors)
            for step, tensors_of_step in by_step.items():
                update(
                    tensors_of_step,
                    factor=self.factor,
                    seed=mixed(self.seed, step, index),
                    coefficients=coefficients(group, step),
                )

    def _advanced(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def mixed(*parts: int) -> int:
    """Return a number of 31 bits that depends on all of `parts` without a pattern."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def coefficients(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    """Return 1 - beta1, 1 - beta2, epsilon, the share of a weight that decay keeps, the rate with
    the bias of the first moment corrected, and the correction of the second moment."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    kept = 1 - rate * group["weight_decay"]
    return 1 - beta1, 1 - beta2, group["eps"], kept, rate / (1 - beta1**step), 1 / (1 - beta2**step)


def update(
    tensors: Sequence[tuple[Tensor, ...]],
    *,
    factor: Tensor | None,
    seed: int,
    coefficients: Sequence[float],
) -> None:
    """Update `(weight, gradient, mean, square)` in place, each contiguous and bf16."""
    device = tensors[0][0].device
    if fused_on(device.type):
        from rlhf_optim import rounding_triton

        factor = torch.ones((), device=device) if factor is None else factor
        rounding_triton.update(tensors, factor=factor, seed=seed, coefficients=coefficients)
        return
    by = 1.0 if factor is None else float(factor)
    if math.isnan(by):
        return
    generator = torch.Generator(device).manual_seed(seed)
    one_minus_beta1, one_minus_beta2, eps, kept, rate, scale = coefficients

    def move(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        gradient = gradient.float() * by
        first = mean.float().lerp_(gradient, one_minus_beta1)
        second = square.float().lerp_(gradient.square_(), one_minus_beta2)
        divisor = (second * scale).sqrt_().add_(eps)
        new = weight.float().mul_(kept).addcdiv_(first, divisor, value=-rate)
        for target, value in ((mean, first), (square, second), (weight, new)):
            target.copy_(rounded_(value, generator))

    for parts in tensors:
        for piece in zip(*(tensor.view(-1).split(CHUNK) for tensor in parts), strict=True):
            move(*piece)


def rounded_(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round finite float32 values in bf16's range in place, to one of their two neighbours in bf16,
    the nearer one with the greater probability; they stay float32. A bf16 value is unchanged."""
    bits = values.view(torch.int32)
    noise = torch.randint(
        1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    # bf16 is the upper half of float32: a carry from the lower half gives the neighbour.
    bits.add_(noise).bitwise_and_(-(1 << 16))
    return values
