"""Values per token of all examples: read from tables on disk, the missing ones computed."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.examples import Examples
from rlhf.data.layout import layout
from rlhf.data.order import NO_GRADIENT_FACTOR
from rlhf.data.packing import pack
from rlhf.engine import Engine, Mesh
from rlhf.errors import counted
from rlhf.reference.run_models import RunModels
from rlhf.reference.stored import LogprobTable
from rlhf.reference.surveyed import SurveyedExamples

SILENCE = 60
"""Seconds after which a long computation prints its progress."""


def attach_values(
    run: RunModels,
    name: str,
    folder: Path,
    engine: Callable[[], Engine],
    *,
    read: Callable[[Engine, PackedBatch], Tensor],
    width: int | None = None,
    surveyed: Sequence[SurveyedExamples] = (),
) -> str:
    """Give the run's examples, and those that are `surveyed`, the value `name` per token (or
    `width` of them), from `folder`; what is missing there is computed with `read` on the engine
    that `engine` loads. Returns what was done, in words. Collective."""
    started, mesh = time.monotonic(), run.mesh
    parts: list[Examples | SurveyedExamples] = [*run.examples, *surveyed]
    tables = [[LogprobTable(folder, file, width=width) for file in part.files] for part in parts]
    by_rank = mesh.gather([table.open() for part in tables for table in part])
    missing = sum(len({*chain(*of_table)}) for of_table in zip(*by_rank, strict=True))
    computed = 0
    if missing:
        fill = Fill(engine(), mesh, run.config.batch.budget, read, missing)
        computed = sum(fill(table) for part in tables for table in part)
    columns = iter(tables)
    run.examples = tuple(part.with_values(name, next(columns)) for part in run.examples)
    if surveyed:
        run.surveyed = tuple(part.with_values(name, next(columns)) for part in surveyed)
    took = time.monotonic() - started
    what = f"{counted(computed, 'example')} computed in {took:.1f} s" if computed else "found"
    return f"{what} in {folder}"


@define
class Fill:
    """Computes with `engine` what tables lack, one after the other. Every host writes into its
    own cache folder."""

    engine: Engine
    mesh: Mesh
    tokens: int
    """The budget of a training micro-batch."""
    read: Callable[[Engine, PackedBatch], Tensor]
    """Returns the values of each prediction [N] or [N, width]."""
    parts: int
    """Missing parts of all tables."""
    done: int = 0
    """Those that have been computed."""
    started: float = field(factory=time.monotonic)

    def __call__(self, table: LogprobTable) -> int:
        """Compute the missing parts; return the number of computed examples. Collective."""
        count, mesh = 0, self.mesh
        missing = sorted({part for parts in mesh.gather(table.open()) for part in parts})
        for part in missing:
            if mesh.rank == 0 and self.done and time.monotonic() - self.started > SILENCE:
                print(f"cache      {self.done} of {self.parts} parts computed", flush=True)
            values = self._values(table, part)
            count += len(table.examples_of(part))
            if mesh.local_rank == 0:
                table.write(part, values)
            self.done += 1
        mesh.barrier()
        left = table.open()
        assert not left, f"parts {left} of {table.folder} are missing"
        return count

    def _values(self, table: LogprobTable, part: int) -> NDArray[np.float32]:
        """Return the values of one part, in the order of its examples. Collective."""
        numbers = table.examples_of(part)
        lengths = table.file.lengths[numbers.start : numbers.stop]
        found = read_examples(
            table.file, numbers, lengths, partial(self.read, self.engine), mesh=self.mesh,
            tokens=NO_GRADIENT_FACTOR * self.tokens, per="prediction",
        )  # fmt: skip
        return np.concatenate(found)


def read_examples(
    examples: Any,
    numbers: Sequence[int],
    lengths: NDArray[np.int64],
    compute: Callable[[PackedBatch], Tensor],
    *,
    mesh: Mesh,
    tokens: int,
    per: Literal["prediction", "answer"],
) -> list[NDArray[np.float32]]:
    """Return what `compute` returns of the examples `numbers`, which have these `lengths`: of each
    example the values of all tokens of its answers, or those of its answers.

    The examples are divided over the ranks, in micro-batches of at most `tokens` tokens or one
    example. Collective.
    """
    ranks = mesh.data
    local: dict[int, NDArray[np.float32]] = {}
    for micro in layout(lengths, ranks.size, max(tokens, int(lengths.max()))):
        chosen = [numbers[int(place)] for place in micro[ranks.rank]]
        batch = pack(examples, chosen)
        with torch.no_grad():
            found = compute(batch.to(mesh.device))
        local |= zip(chosen, _by_example(found.cpu().float(), batch, per), strict=True)
    whole = {n: values for share in ranks.gather(local) for n, values in share.items()}
    return [whole[number] for number in numbers]


def _by_example(found: Tensor, batch: PackedBatch, per: str) -> Iterator[NDArray[np.float32]]:
    """Yield the values of each example, of those of a batch per prediction [N, ...] or per answer
    [A, ...]."""
    start = 0
    if per == "prediction":
        values = torch.full((len(batch.tokens), *found.shape[1:]), torch.nan)
        values[batch.predict_at] = found
    for prompt, answers in batch.spans:
        if per == "answer":
            start, first = start + len(answers), start
            yield found[first:start].numpy().copy()
            continue
        first, start = start + prompt, start + prompt + sum(answers)
        yield values[first:start].numpy().copy()
