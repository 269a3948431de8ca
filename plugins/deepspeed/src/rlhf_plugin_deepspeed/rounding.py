"""AdamW whose weights and moments are all bf16: every result is rounded stochastically.

Rounded to the nearest, an update below 1/512 of a weight is lost, and a second moment at beta 0.999
never falls. Up with the probability of the rest, the mean is right whatever the size of the change
(Zamirai et al., arXiv 2010.06192, section 4).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhf.engine import fused_on

CHUNK = 1 << 24
"""Elements that are in float32 at the same time where there is no fused kernel."""


class RoundedAdamW(Optimizer):
    """AdamW (arXiv 1711.05101, algorithm 2) in float32 arithmetic over bf16 states.

    What is drawn depends on `seed`, the step and the place alone: ranks that hold the same weights
    round them alike, and a resumed run goes on as it would have.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__([dict(group) for group in params], defaults)
        self.seed = seed
        self.factor: Tensor | None = None
        """Multiplies all gradients of the next step: a float32 scalar on their device. Where it is
        not a number the step moves nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "the gradients are there already"
        for index, group in enumerate(self.param_groups):
            by_step: dict[int, list[tuple[Tensor, ...]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._advanced(parameter)
                    moments = (state["exp_avg"], state["exp_avg_sq"])
                    tensors = (parameter, parameter.grad, *moments)
                    by_step.setdefault(state["step"], []).append(
                        tuple(tensor.view(-1) for tensor in tensors)
                    )
            for step, tensors_of_step in by_step.items():
                update(
                    tensors_of_step, factor=self.factor, seed=mixed(self.seed, step, index),
                    numbers=numbers(group, step),
                )  # fmt: skip

    def _advanced(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def mixed(*parts: int) -> int:
    """A number of 31 bits that depends on all of `parts` without a pattern."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def numbers(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    """What an update multiplies by: the share of the new in both moments, epsilon, what weight
    decay leaves, the rate with the first moment's bias corrected, the second's correction."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    kept = 1 - rate * group["weight_decay"]
    return 1 - beta1, 1 - beta2, group["eps"], kept, rate / (1 - beta1**step), 1 / (1 - beta2**step)


def update(
    tensors: Sequence[tuple[Tensor, ...]],
    *,
    factor: Tensor | None,
    seed: int,
    numbers: Sequence[float],
) -> None:
    """One update in place of `(weight, gradient, mean, square)`, each flat and bf16."""
    device = tensors[0][0].device
    if fused_on(device.type):
        from rlhf_plugin_deepspeed import rounding_triton

        pieces = list(_pieces(tensors, rounding_triton.PIECE))
        factor = torch.ones((), device=device) if factor is None else factor
        rounding_triton.update(pieces, factor=factor, seed=seed, numbers=numbers)
        return
    by = 1.0 if factor is None else float(factor)
    if math.isnan(by):
        return
    generator = torch.Generator(device).manual_seed(seed)
    for piece in _pieces(tensors, CHUNK):
        _update_piece(*piece, factor=by, generator=generator, numbers=numbers)


def _pieces(tensors: Iterable[tuple[Tensor, ...]], size: int) -> Iterator[tuple[Tensor, ...]]:
    for parts in tensors:
        yield from zip(*(tensor.split(size) for tensor in parts), strict=True)


def _update_piece(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    factor: float,
    generator: torch.Generator,
    numbers: Sequence[float],
) -> None:
    rise1, rise2, eps, kept, rate, scale = numbers
    slope = gradient.float() * factor
    first = mean.float().lerp_(slope, rise1)
    second = square.float().lerp_(slope.square_(), rise2)
    divisor = (second * scale).sqrt_().add_(eps)
    new = weight.float().mul_(kept).addcdiv_(first, divisor, value=-rate)
    for target, value in ((mean, first), (square, second), (weight, new)):
        target.copy_(rounded_(value, generator))


def rounded_(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Finite float32 values in bf16's range, in place: each becomes one of its two neighbours in
    bf16, still held as float32, the nearer one with the greater probability. A value of bf16 stays
    what it is."""
    bits = values.view(torch.int32)
    noise = torch.randint(
        1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    # bf16 is the upper half of float32: a carry from the lower half is the step to its neighbour.
    bits.add_(noise).bitwise_and_(-(1 << 16))
    return values
