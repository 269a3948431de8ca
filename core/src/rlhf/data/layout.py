"""The rows of each optimizer step, and the layout of a step over ranks and micro-batches."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf.errors import RLHFError

Rows = NDArray[np.int64]
QUADRATIC = 1 / 32_768
"""Weight of attention's quadratic cost relative to the linear cost: at a path of 32k tokens both
are about equal (benchmarks/RESULTS.md, Long rows)."""


def steps(num_rows: int, size: int, seed: int, epoch: int, *, shuffle: bool = True) -> list[Rows]:
    """Return the rows of each optimizer step of one epoch; the last step takes the remainder.

    Depends only on the arguments, so the order is the same on any hardware.
    """
    if shuffle:
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
    else:
        order = np.arange(num_rows)
    return [order[start : start + size] for start in range(0, num_rows, size)]


def costs(lengths: NDArray[np.int64], paths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the relative work per example [n], from its tokens and those of its longest path."""
    return lengths * (1.0 + QUADRATIC * paths)


def layout(
    lengths: Sequence[int] | NDArray[np.int64],
    ranks: int,
    tokens: int,
    costs: Sequence[float] | NDArray[np.float64] | None = None,
) -> list[list[Rows]]:
    """Return positions within the step as `[micro][rank]`, each of at most `tokens` tokens.

    Every rank has the same number of micro-batches, as few as possible; a rank without examples
    left has an empty one. The work is spread evenly, and micro-batches that run at the same time
    are alike. Raises RLHFError for an example that is larger than the budget.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    total = int(sizes.sum())
    if len(sizes) and int(sizes.max()) > tokens:
        raise RLHFError(
            f"an example has {int(sizes.max())} tokens, more than batch.tokens {tokens}; "
            f"set batch.tokens to at least {int(sizes.max())}"
        )
    micro = max(1, -(-total // (tokens * ranks)))
    work = sizes if costs is None else np.asarray(costs)
    by_work = np.argsort(-work, kind="stable")
    plain_sizes, plain_work = sizes.tolist(), work.tolist()
    while True:
        bins = micro * ranks
        filled = _balanced(by_work.tolist(), plain_sizes, plain_work, bins, tokens)
        if filled is None:
            filled = _tight(np.argsort(-sizes, kind="stable").tolist(), plain_sizes, bins, tokens)
        if filled is not None:
            return _arrange(filled, plain_work, ranks)
        micro += 1


def groups_by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return positions of rows that run together, the longest first: as many in a group as have at
    most `tokens` tokens when padded to its longest, or one."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _balanced(
    order: list[int], sizes: list[int], work: list[float], bins: int, tokens: int
) -> list[list[int]] | None:
    """Put the costliest first into the bin with room and the least work; None if one does not
    fit."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, number, 0) for number in range(bins)]
    for item in order:
        full = []
        while heap and heap[0][2] + sizes[item] > tokens:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number, used = heap[0]
        heapq.heapreplace(heap, (load + work[item], number, used + sizes[item]))
        filled[number].append(item)
        for entry in full:
            heapq.heappush(heap, entry)
    return filled


def _tight(order: list[int], sizes: list[int], bins: int, tokens: int) -> list[list[int]] | None:
    """Put the longest first into the first bin with room: packs tighter, balances worse."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    room = [tokens] * bins
    for item in order:
        size = sizes[item]
        for number, left in enumerate(room):
            if size <= left:
                room[number] = left - size
                filled[number].append(item)
                break
        else:
            return None
    return filled


def _arrange(filled: list[list[int]], work: list[float], ranks: int) -> list[list[Rows]]:
    """Run bins of similar work at the same time; the heaviest bin of each group goes to the rank
    with the least work so far."""
    loads = [sum([work[item] for item in items]) for items in filled]
    order = sorted(range(len(filled)), key=lambda number: (-loads[number], number))
    done = [0.0] * ranks
    out = []
    for start in range(0, len(order), ranks):
        group = order[start : start + ranks]
        row: list[Rows] = [np.empty(0, np.int64)] * ranks
        for number, rank in zip(group, sorted(range(ranks), key=done.__getitem__), strict=True):
            row[rank] = np.array(sorted(filled[number]), dtype=np.int64)
            done[rank] += loads[number]
        out.append(row)
    return out
