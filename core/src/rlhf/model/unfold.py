"""A packed batch unfolded into branches that share nothing, and the indices back into the batch.

A branch is one prompt with one of its answers, as the indices of its tokens in the packed row.
"""

from collections.abc import Iterable
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.layout import groups_by_length
from rlhf.data.packing import blank_batch


def branches_of(batch: PackedBatch) -> list[list[int]]:
    """Return every branch of the batch; of a filler batch the whole row as one, so that its rank
    runs a forward too."""
    if not batch.spans:
        return [list(range(len(batch.tokens)))]
    branches, start = [], 0
    for prompt, answers in batch.spans:
        shared = range(start, start + prompt)
        start += prompt
        for answer in answers or (0,):
            branches.append([*shared, *range(start, start + answer)])
            start += answer
    return branches


def unshared(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """Return one row in which every branch is its own example, and for each of the batch's T tokens
    its index in that row [T]."""
    branches = branches_of(batch)
    lengths = [len(branch) for branch in branches]
    places = [place for branch in branches for place in branch]
    tokens = batch.tokens[torch.tensor(places, device=batch.tokens.device)]
    row = blank_batch(tokens, tuple((length, ()) for length in lengths))
    return row, way_back(batch, branches, lengths)


def rounded_up(batch: PackedBatch, size: int) -> PackedBatch:
    """Return the batch with T rounded up to a multiple of `size`. The new tokens belong to no
    example, and no other token sees them."""
    missing = -len(batch.tokens) % size
    if not missing:
        return batch
    pad = torch.nn.functional.pad
    return attrs.evolve(
        batch,
        tokens=pad(batch.tokens, (0, missing)),
        positions=pad(batch.positions, (0, missing)),
        example=pad(batch.example, (0, missing), value=-1),
        branch=pad(batch.branch, (0, missing)),
    )


def padded_rows(batch: PackedBatch, *, most: int) -> tuple[list[Tensor], Tensor]:
    """Return the branches as rows of token ids, in groups [rows, longest] of at most `most` tokens
    or one row, and for each of the batch's T tokens its index in the groups laid end to end [T].

    Padding is on the right, where a causal model does not see it.
    """
    branches = branches_of(batch)
    groups, order, widths = [], [], []
    for group in groups_by_length([len(branch) for branch in branches], most):
        rows = [branches[number] for number in group]
        longest = len(rows[0])
        places = [row + row[:1] * (longest - len(row)) for row in rows]
        groups.append(batch.tokens[torch.tensor(places, device=batch.tokens.device)])
        order += rows
        widths += [longest] * len(rows)
    return groups, way_back(batch, order, widths)


def way_back(batch: PackedBatch, branches: Iterable[list[int]], widths: Iterable[int]) -> Tensor:
    """Return for each of the batch's T tokens its index in a row that gives each of `branches` its
    width [T]. A prompt points at one of its copies; tokens that only round T up point at 0."""
    back = [0] * len(batch.tokens)
    for branch, start in zip(branches, accumulate(widths, initial=0), strict=False):
        for index, place in enumerate(branch, start):
            back[place] = index
    return torch.tensor(back, device=batch.tokens.device)
