"""Optimizers that keep one tensor per parameter, such as Lion.

Every element is updated by itself, so that the result does not depend on how the weights are
sharded. Weight decay is decoupled, as AdamW's.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STATE = "exp_avg"
"""The name of the state, as Adam's first moment: after one step the gradient up to a factor."""
Rule = Callable[[list[Tensor], list[Tensor], tuple[float, float]], list[Tensor]]
"""`rule(gradients, states, betas)` updates the states and returns what weights move against."""


class FirstMomentOptimizer(Optimizer):
    """Moves the weights by `rule`."""

    def __init__(self, params: Iterable[Mapping[str, Any]], *, rule: Rule, **settings: Any) -> None:
        super().__init__([dict(group) for group in params], {"weight_decay": 0.0, **settings})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            move(group, self.state, self.rule)


def move(group: Mapping[str, Any], state: dict[Tensor, dict[str, Tensor]], rule: Rule) -> None:
    """Move the parameters of a group that have a gradient by `rule`."""
    pairs = [(item, item.grad) for item in group["params"] if item.grad is not None]
    if not pairs:
        return
    weights, gradients = map(list, zip(*pairs, strict=True))
    for weight in weights:
        if not state[weight]:
            state[weight][STATE] = torch.zeros_like(weight)
    moves = rule(gradients, [state[weight][STATE] for weight in weights], group["betas"])
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(weights, moves, alpha=-group["lr"])


def lion(gradients: list[Tensor], states: list[Tensor], betas: tuple[float, float]) -> list[Tensor]:
    """Lion (arXiv 2302.06675, algorithm 2): the sign of a mean of gradient and state."""
    moves = list(torch._foreach_lerp(states, gradients, 1 - betas[0]))
    torch._foreach_sign_(moves)
    torch._foreach_lerp_(states, gradients, 1 - betas[1])
    return moves


def momentum(
    gradients: list[Tensor], states: list[Tensor], betas: tuple[float, float]
) -> list[Tensor]:
    """Momentum as in torch.optim.SGD: the gradient plus beta times the last move."""
    torch._foreach_mul_(states, betas[0])
    torch._foreach_add_(states, gradients)
    return states


RULES: Mapping[str, Rule] = {"lion": lion, "sgd": momentum}
"""The rules by `optim.name`."""
