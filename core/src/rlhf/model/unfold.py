"""A packed batch unfolded into branches that share nothing, and the indices back into the batch.

A branch is one prompt with one of its answers, as the indices of its tokens in the packed row.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from rlhf.data.batch import TOKEN_INPUTS, PackedBatch
from rlhf.data.layout import groups_by_length
from rlhf.data.packing import blank_batch
from rlhf.devices import on_device


def branches_of(batch: PackedBatch) -> list[list[int]]:
    """Return every branch of the batch; of a filler batch the whole row as one, so that its rank
    runs a forward too. The blank is the last one."""
    if not batch.spans:
        return [list(range(batch.blank or len(batch.tokens)))]
    branches, start = [], 0
    for prompt, answers in batch.spans:
        shared = range(start, start + prompt)
        start += prompt
        for answer in answers or (0,):
            branches.append([*shared, *range(start, start + answer)])
            start += answer
    if batch.blank:
        branches.append(list(range(start, start + batch.blank)))
    return branches


def segments_of(batch: PackedBatch) -> list[list[int]]:
    """Return for each of `branches_of` the places of its prompt and its answer, or of the blank, in
    each of `PackedBatch.input_rows`."""
    segments, start = [], 0
    for _, answers in batch.spans:
        own = range(start + 1, start + 1 + len(answers))
        segments += [[start, answer] for answer in own] or [[start]]
        start += 1 + len(answers)
    return [*segments, [start]] if batch.blank else segments


def inputs_at(
    batch: PackedBatch, places: Tensor, segments: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the inputs of the tokens at `places` and of these `segments_of` branches."""
    inputs = {}
    for name, value in batch.inputs.items():
        if name in TOKEN_INPUTS:
            inputs[name] = value[places]
            continue
        ends = [0, *accumulate(batch.input_rows[name])]
        parts = [range(ends[part], ends[part + 1]) for branch in segments for part in branch]
        rows = torch.tensor([row for part in parts for row in part], dtype=torch.long)
        inputs[name] = value[on_device(rows, value.device)]
        if hasattr(value, "host"):
            inputs[name].host = value.host[rows]
    return inputs


def unshared(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """Return one row in which every branch is its own example, and for each of the batch's T tokens
    its index in that row [T]."""
    branches = branches_of(batch)
    lengths = [len(branch) for branch in branches]
    flat = [place for branch in branches for place in branch]
    places = on_device(flat, batch.tokens.device)
    of_examples = lengths[:-1] if batch.blank else lengths
    row = blank_batch(batch.tokens[places], tuple((length, ()) for length in of_examples))
    if batch.inputs:
        segments = segments_of(batch)
        rows = {
            name: tuple(sum(own[part] for part in branch) for branch in segments)
            for name, own in batch.input_rows.items()
        }
        inputs = inputs_at(batch, places, segments)
        row = attrs.evolve(row, inputs=inputs, input_rows=rows, blank=batch.blank)
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
        inputs={
            name: longer(value, missing) if name in TOKEN_INPUTS else value
            for name, value in batch.inputs.items()
        },
    )


def longer(value: Tensor, missing: int) -> Tensor:
    """Return `value` [T, ...] with so many more rows of zeros."""
    return torch.cat((value, value.new_zeros(missing, *value.shape[1:])))


class Rows(NamedTuple):
    """Branches as rows of token ids [rows, longest], with the inputs of the model."""

    tokens: Tensor
    inputs: dict[str, Any]


def padded_rows(batch: PackedBatch, *, most: int) -> tuple[list[Rows], Tensor]:
    """Return the branches in groups of at most `most` tokens or one row, and for each of the
    batch's T tokens its index in the groups laid end to end [T].

    Padding is on the right, where a causal model does not see it. A group without images gets a
    copy of a row that has some, so that each pass computes images.
    """
    branches, segments = branches_of(batch), segments_of(batch)
    groups, order, widths = [], [], []
    padding = len(batch.tokens)
    if batch.inputs:
        # The first token of a row may stand for an image.
        batch = rounded_up(batch, padding + 1)
    images = [number for number, own in enumerate(segments) if num_rows(batch, own)]
    for group in groups_by_length([len(branch) for branch in branches], most):
        spare = min(images, key=lambda number: len(branches[number]), default=None)
        copies = [] if spare is None or {*group} & {*images} else [spare]
        rows = [branches[number] for number in (*group, *copies)]
        longest = max(map(len, rows))
        fill = [[padding] if batch.inputs else row[:1] for row in rows]
        filled = [row + own * (longest - len(row)) for row, own in zip(rows, fill, strict=True)]
        places = on_device(filled, batch.tokens.device)
        own = [segments[number] for number in (*group, *copies)] if batch.inputs else []
        groups.append(Rows(batch.tokens[places], inputs_at(batch, places, own)))
        order += rows[: len(group)] + [[] for _ in copies]
        widths += [longest] * len(rows)
    return groups, way_back(batch, order, widths)[:padding]


def num_rows(batch: PackedBatch, segments: Sequence[int]) -> int:
    """Return the number of rows of inputs of these segments."""
    return sum(rows[part] for rows in batch.input_rows.values() for part in segments)


def way_back(batch: PackedBatch, branches: Iterable[list[int]], widths: Iterable[int]) -> Tensor:
    """Return for each of the batch's T tokens its index in a row that gives each of `branches` its
    width [T]. A prompt points at one of its copies; tokens that only round T up point at 0."""
    back = [0] * len(batch.tokens)
    for branch, start in zip(branches, accumulate(widths, initial=0), strict=False):
        for index, place in enumerate(branch, start):
            back[place] = index
    return on_device(back, batch.tokens.device)
