"""Rotary embeddings (Su et al., arXiv 2104.09864) of any family by our kernel
(`rotary_triton.py`), recognised by what a family's function computes."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

ACCEPTED = 1e-5
"""Largest relative error with which a function is recognised, in float32."""


class Formula(NamedTuple):
    """How a function rotates heads x [..., C] by cos and sin: y_c = x_c cos_a + s x_b sin_a for
    the channels c below `rotated`; the others stay. b is the other channel of c's pair, and s is
    -1 for the first of a pair, else 1."""

    rotated: int
    neighbours: bool
    """Whether pairs are channels 2 n and 2 n + 1; else n and n + rotated / 2."""
    shared: bool
    """Whether both channels of pair n have the numbers a = n; else a = c."""

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return b, s and a of the rotated channels."""
        channel, half = torch.arange(self.rotated, device="cpu"), self.rotated // 2
        second = (channel % 2 if self.neighbours else channel // half).bool()
        other = channel ^ 1 if self.neighbours else (channel + half) % self.rotated
        pair = channel // 2 if self.neighbours else channel % half
        return other, torch.where(second, 1.0, -1.0), pair if self.shared else channel

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads [B, H, T, C] by cos and sin [B, T, R] with torch's operators."""
        other, sign, at = self.places()
        rotated, rest = heads[..., : self.rotated], heads[..., self.rotated :]
        cos, sin = (numbers[:, None, :, at] for numbers in (cos, sin))
        return torch.cat((rotated * cos + sign * rotated[..., other] * sin, rest), -1)


def formulas(width: int) -> Iterator[Formula]:
    """Yield what a function may compute with cos and sin of `width`."""
    for neighbours, shared in product((False, True), repeat=2):
        yield Formula(width, neighbours, shared)
        if shared:
            yield Formula(2 * width, neighbours, shared)


def formula_of(rotary: Callable[..., Any], channels: int, width: int) -> Formula | None:
    """Return what `rotary(query, key, cos, sin)` computes of heads of `channels` with cos and sin
    of `width`, found by calling it; None if it is not a rotation of both."""
    draw = torch.Generator("cpu").manual_seed(0)
    # Numbers of rows, heads and tokens that do not broadcast to one another.
    shapes = ((2, 3, 5, channels), (2, 1, 5, channels), (2, 5, width), (2, 5, width))
    query, key, cos, sin = (
        torch.randn(shape, generator=draw, device="cpu", dtype=torch.float32) for shape in shapes
    )
    try:
        found = rotary(query.clone(), key.clone(), cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):  # It takes other arguments.
        return None
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    for formula in formulas(width):
        if formula.rotated <= channels and formula.rotated % 2 == 0:
            expected = [formula(heads, cos, sin) for heads in (query, key)]
            same = partial(torch.allclose, rtol=ACCEPTED, atol=ACCEPTED)
            if all(
                one.shape == other.shape and same(one, other)
                for one, other in zip(found, expected, strict=True)
            ):
                return formula
    return None


class Rotation:
    """A family's rotary embedding: our kernel where that computes the same, else the family's own
    function."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self._formulas: dict[tuple[int, int], Formula | None] = {}

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
    ) -> Any:
        """Rotate queries [B, H, T, C] and keys by cos and sin [B, T, R]."""
        plain = not rest and options in ({}, {"unsqueeze_dim": 1})
        if plain and fits(query, key, cos, sin):
            formula = self.formula(query.shape[-1], cos.shape[-1])
            if formula is not None:
                from rlhf_kernels.rotary_triton import Rotate

                return Rotate.apply(query, key, cos, sin, *formula)
        return self.own(query, key, cos, sin, *rest, **options)

    def formula(self, channels: int, width: int) -> Formula | None:
        """Return what the family's function computes of such heads."""
        sizes = channels, width
        if sizes not in self._formulas:
            self._formulas[sizes] = formula_of(self.own, channels, width)
        return self._formulas[sizes]


def fits(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel takes these: queries and keys [B, H, T, C] of the same tokens, cos
    and sin [B or 1, T, R] without gradients, all of one dtype."""
    if query.dim() != 4 or key.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    rows, _, tokens, channels = query.shape
    return (
        (len(key), *key.shape[2:]) == (rows, tokens, channels)
        and len(cos) in (1, rows)
        and cos.shape[1] == tokens
        and query.dtype == key.dtype == cos.dtype == sin.dtype
        and not (cos.requires_grad or sin.requires_grad)
    )
