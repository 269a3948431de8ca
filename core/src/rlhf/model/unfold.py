"""A packed batch unfolded: the same paths as rows without sharing, and the way back again."""

from collections.abc import Iterable, Sequence

import attrs
import torch
from attrs import frozen
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.model.masks import BLOCK


@frozen
class Path:
    """One prompt with one of its answers, by the places of its tokens in the packed row."""

    example: int
    start: int
    prompt: int
    answer_start: int
    answer: int

    @property
    def length(self) -> int:
        return self.prompt + self.answer

    @property
    def places(self) -> list[int]:
        """Where the path's tokens stand in the packed row."""
        prompt = range(self.start, self.start + self.prompt)
        return [*prompt, *range(self.answer_start, self.answer_start + self.answer)]


def paths_of(batch: PackedBatch) -> list[Path]:
    """Every path of the batch; of a filler the whole row as one, so that it too has something to
    run."""
    if not batch.spans:
        return [Path(0, 0, len(batch.tokens), len(batch.tokens), 0)]
    paths = []
    start = 0
    for example, (prompt, answers) in enumerate(batch.spans):
        place = start + prompt
        for answer in answers or (0,):
            paths.append(Path(example, start, prompt, place, answer))
            place += answer
        start = place
    return paths


def unshared(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """One row in which every path is an example of its own, and for each of the batch's T tokens
    its place in that row [T]."""
    paths = paths_of(batch)
    lengths = [path.length for path in paths]
    device = batch.tokens.device
    places = torch.tensor([place for path in paths for place in path.places], device=device)
    example = torch.repeat_interleave(
        torch.arange(len(paths), device=device), torch.tensor(lengths, device=device)
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
    return row, way_back(len(batch.tokens), paths, offsets(lengths), device)


def in_whole_blocks(batch: PackedBatch) -> PackedBatch:
    """The batch with T rounded up to whole blocks of flex attention, which has no kernel for part
    of one; the new tokens see themselves alone."""
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


def padded_groups(batch: PackedBatch, *, most: int) -> list[list[Path]]:
    """The paths, sorted by length, in groups that take at most `most` tokens each when padded to
    their longest (a longer path has a group of its own)."""
    groups: list[list[Path]] = []
    for path in sorted(paths_of(batch), key=lambda path: -path.length):
        if groups and (len(groups[-1]) + 1) * groups[-1][0].length <= most:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups


def padded_rows(batch: PackedBatch, group: Sequence[Path]) -> Tensor:
    """Token ids [rows, longest]. Padding stands on the right, where no causal model looks at it."""
    longest = group[0].length
    places = [path.places + [path.start] * (longest - path.length) for path in group]
    return batch.tokens[torch.tensor(places, device=batch.tokens.device)]


def padded_way_back(batch: PackedBatch, groups: Sequence[Sequence[Path]]) -> Tensor:
    """For each of the batch's T tokens its place in the groups' padded rows, one after another
    [T]."""
    starts, place = [], 0
    for group in groups:
        starts += [place + index * group[0].length for index in range(len(group))]
        place += len(group) * group[0].length
    paths = [path for group in groups for path in group]
    return way_back(len(batch.tokens), paths, starts, batch.tokens.device)


def way_back(
    num_tokens: int, paths: Sequence[Path], starts: Sequence[int], device: torch.device
) -> Tensor:
    """For each token of the packed row its place where `paths` begin at `starts` [T]. A prompt is
    taken from one of its copies; tokens that only round the row up point at 0."""
    back = [0] * num_tokens
    for path, start in zip(paths, starts, strict=True):
        for index, place in enumerate(path.places):
            back[place] = start + index
    return torch.tensor(back, device=device)


def offsets(lengths: Iterable[int]) -> list[int]:
    """Where each of the consecutive pieces begins."""
    starts, place = [], 0
    for length in lengths:
        starts.append(place)
        place += length
    return starts
