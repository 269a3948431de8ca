"""AdamW whose weights and moments are all bf16: every result is rounded stochastically.

Rounded to the nearest, an update below 1/512 of a weight is lost, and a second moment at beta 0.999
never falls. Up with the probability of the rest, the mean is right whatever the size of the change
(Zamirai et al., arXiv 2010.06192, section 4).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK = 1 << 24
"""Elements that are in float32 at the same time."""


class RoundedAdamW(Optimizer):
    """AdamW (arXiv 1711.05101, algorithm 2) in float32 arithmetic over bf16 states, 6 bytes per
    parameter with its weight. Draws from the device's default generator, so that a run that goes on
    from its random state rounds as it would have."""

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([dict(group) for group in params], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        flat = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        parts = zip(*(tensor.view(-1).split(CHUNK) for tensor in flat), strict=True)
        for part in parts:
            _update_part(*part, step=state["step"], group=group)


def _update_part(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    group: Mapping[str, Any],
) -> None:
    rate, (beta1, beta2) = group["lr"], group["betas"]
    slope = gradient.float()
    first = mean.float().lerp_(slope, 1 - beta1)
    second = square.float().lerp_(slope.square_(), 1 - beta2)
    divisor = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    new = weight.float().mul_(1 - rate * group["weight_decay"])
    new.addcdiv_(first, divisor, value=-rate / (1 - beta1**step))
    for target, value in ((mean, first), (square, second), (weight, new)):
        target.copy_(rounded_(value))


def rounded_(values: Tensor) -> Tensor:
    """Finite float32 values in bf16's range, in place: each becomes one of its two neighbours in
    bf16, still held as float32, the nearer one with the greater probability. A value of bf16 stays
    what it is."""
    bits = values.view(torch.int32)
    # bf16 is the upper half of float32: a carry from the lower half is the step to its neighbour.
    bits.add_(torch.randint_like(bits, 1 << 16)).bitwise_and_(-(1 << 16))
    return values
