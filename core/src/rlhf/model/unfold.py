"""A packed batch unfolded into branches that share nothing, and the indices back into the batch."""

from collections.abc import Iterable, Sequence

import attrs
import torch
from attrs import frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model.masks import BLOCK


@frozen
class Branch:
    """One prompt with one of its answers, as positions in the packed row."""

    example: int
    start: int
    prompt: int
    answer_start: int
    answer: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.prompt + self.answer

    @property
    def places(self) -> list[int]:
        """Indices of the branch's tokens in the packed row."""
        prompt = range(self.start, self.start + self.prompt)
        return [*prompt, *range(self.answer_start, self.answer_start + self.answer)]


def branches_of(batch: PackedBatch) -> list[Branch]:
    """Return every branch of the batch; of a filler batch the whole row as one, so that its rank
    runs a forward too."""
    if not batch.spans:
        return [Branch(0, 0, len(batch.tokens), len(batch.tokens), 0)]
    branches = []
    start = 0
    for example, (prompt, answers) in enumerate(batch.spans):
        place = start + prompt
        for answer in answers or (0,):
            branches.append(Branch(example, start, prompt, place, answer))
            place += answer
        start = place
    return branches


def unshared(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """Return one row in which every branch is its own example, and for each of the batch's T tokens
    its index in that row [T]."""
    branches = branches_of(batch)
    lengths = [branch.length for branch in branches]
    device = batch.tokens.device
    places = torch.tensor([place for branch in branches for place in branch.places], device=device)
    example = torch.repeat_interleave(
        torch.arange(len(branches), device=device), torch.tensor(lengths, device=device)
    )
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    empty = torch.zeros(0, dtype=torch.long, device=device)
    row = PackedBatch(
        tokens=batch.tokens[places],
        positions=positions,
        example=example,
        branch=torch.zeros(len(places), dtype=torch.long, device=device),
        predict_from=empty,
        predict_at=empty,
        predict=empty,
        answer=empty,
        answer_example=empty,
        answer_end=empty,
        spans=tuple((length, ()) for length in lengths),
    )
    return row, way_back(len(batch.tokens), branches, offsets(lengths), device)


def in_whole_blocks(batch: PackedBatch) -> PackedBatch:
    """Return the batch with T rounded up to whole blocks, since flex attention has no kernel for
    part of one. The new tokens see only themselves."""
    missing = -len(batch.tokens) % BLOCK
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


def padded_groups(batch: PackedBatch, *, most: int) -> list[list[Branch]]:
    """Return the branches, sorted by length, in groups of at most `most` tokens when padded to
    their longest; a longer branch is a group by itself."""
    groups: list[list[Branch]] = []
    for branch in sorted(branches_of(batch), key=lambda branch: -branch.length):
        if groups and (len(groups[-1]) + 1) * groups[-1][0].length <= most:
            groups[-1].append(branch)
        else:
            groups.append([branch])
    return groups


def padded_rows(batch: PackedBatch, group: Sequence[Branch]) -> Tensor:
    """Return token ids [rows, longest]. Padding is on the right, where a causal model does not see
    it."""
    longest = group[0].length
    places = [branch.places + [branch.start] * (longest - branch.length) for branch in group]
    return batch.tokens[torch.tensor(places, device=batch.tokens.device)]


def padded_way_back(batch: PackedBatch, groups: Sequence[Sequence[Branch]]) -> Tensor:
    """Return for each of the batch's T tokens its index in the groups' padded rows, laid end to end
    [T]."""
    starts, place = [], 0
    for group in groups:
        starts += [place + index * group[0].length for index in range(len(group))]
        place += len(group) * group[0].length
    branches = [branch for group in groups for branch in group]
    return way_back(len(batch.tokens), branches, starts, batch.tokens.device)


def way_back(
    num_tokens: int, branches: Sequence[Branch], starts: Sequence[int], device: torch.device
) -> Tensor:
    """Return for each token of the packed row its index in a layout where `branches` begin at
    `starts` [T]. A prompt points at one of its copies; tokens that only round the row up point at
    0."""
    back = [0] * num_tokens
    for branch, start in zip(branches, starts, strict=True):
        for index, place in enumerate(branch.places):
            back[place] = start + index
    return torch.tensor(back, device=device)


def offsets(lengths: Iterable[int]) -> list[int]:
    """Return where each of the consecutive pieces begins."""
    starts, place = [], 0
    for length in lengths:
        starts.append(place)
        place += length
    return starts
