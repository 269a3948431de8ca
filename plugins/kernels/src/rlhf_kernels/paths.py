"""The paths of a packed row's trees, as short convolutions and scans read them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64
"""Tokens that a scan computes at a time, in torch unless its argument `chunk_size` is smaller."""


class Segment(NamedTuple):
    """Tokens of a row that follow one another on a path: a prompt, an answer, or both of a chain.

    `parent` is the index of the answer's prompt among the segments; None if it starts a path.
    """

    tokens: range
    parent: int | None


class Links(NamedTuple):
    """Which tokens of a row of T lie 1 to `steps` steps before one another on a path.

    `before` [steps, T] are the indices of the tokens so many steps before each one, -1 where there
    are none. Of a token with several tokens after it, those that do not lie as far behind it in
    the row are `later` [N], as (index * (steps + 1) + steps between), its own from `offsets`
    [T + 1] of its index to the next. All are int32.
    """

    before: Tensor
    later: Tensor
    offsets: Tensor


def links_of(segments: Sequence[Segment], steps: int, as_tensor: Callable[[Any], Tensor]) -> Links:
    """Return the links of the tokens of `segments`, in the order of the row, over `steps` steps;
    `as_tensor` makes tensors of arrays."""
    lengths = [len(one.tokens) for one in segments]
    parents = [range(0) if one.parent is None else segments[one.parent].tokens for one in segments]
    start, parent_start, parent_end = (
        np.repeat(ends, lengths)
        for ends in (
            [one.tokens.start for one in segments],
            [tokens.start for tokens in parents],
            [tokens.stop for tokens in parents],
        )
    )
    token, step = np.arange(len(start)), np.arange(1, steps + 1)[:, None]
    plain = token - step
    on_parent = plain < start
    before = np.where(on_parent, parent_end - start + plain, plain)
    before[on_parent & (before < parent_start)] = -1
    between, after = np.nonzero((before >= 0) & (before != plain))
    whose = before[between, after]
    order = np.argsort(whose, kind="stable")
    later = (after * (steps + 1) + between + 1)[order]
    offsets = np.concatenate(([0], np.bincount(whose, minlength=len(token)).cumsum()))
    return Links(*(as_tensor(values.astype(np.int32)) for values in (before, later, offsets)))


def ends_of(lengths: Sequence[int]) -> dict[str, NDArray[np.int64]]:
    """Return where segments of these lengths end that lie end to end, as flash-linear-attention
    takes it: each reaches from one of `cu_seqlens` [S + 1] to the next, and `chunk_indices` [N, 2]
    are the segment of each chunk and its number in it, for which the host would wait if the library
    computed them."""
    tokens = np.array(lengths)
    counts = -(-tokens // CHUNK)
    segment = np.repeat(np.arange(len(tokens)), counts)
    within = np.arange(len(segment)) - (counts.cumsum() - counts)[segment]
    offsets = np.concatenate(([0], tokens.cumsum()))
    return {"cu_seqlens": offsets, "chunk_indices": np.stack((segment, within), 1)}
