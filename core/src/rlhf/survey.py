"""The survey: values of the whole optimizer step that a loss needs and that are no sums over
micro-batches."""

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.trainer import Trainer


def take_survey(
    trainer: Trainer,
    batches: Sequence[PackedBatch],
    rows: Iterable[int],
    mesh: Mesh,
    *,
    surveyed: Sequence[PackedBatch] = (),
) -> list[PackedBatch]:
    """The step's micro-batches with every surveyed value in `batch.step`, in the order of `rows`.

    `rows` are the row numbers of the step's examples in its order, over all ranks; `surveyed` are
    the micro-batches that the survey sees instead of the loss's own. Beside the trainer's own names
    stand `examples` [E] and `answers` [A]: where this batch's own are in these values (the answers
    if the survey's examples begin with the same ones). Collective.
    """
    seen = surveyed or batches
    with torch.no_grad():
        found = [dict(trainer.survey(batch)) for batch in seen]
    shares = mesh.gather(
        [_to_host(batch, values) for batch, values in zip(seen, found, strict=True)]
    )
    by_row = {
        row: (sizes, values) for share in shares for part in share for row, sizes, values in part
    }
    order = [int(row) for row in rows]
    ordered = [by_row[row] for row in order]
    names = ordered[0][1].keys() if ordered else ()
    device = batches[0].tokens.device if batches else mesh.device
    whole = {name: torch.cat([values[name] for _, values in ordered]).to(device) for name in names}
    places = {row: place for place, row in enumerate(order)}
    first_answer = _running_total([sizes for sizes, _ in ordered])
    return [_with_step(batch, whole, places, first_answer) for batch in batches]


def totals_of(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """The total of each surveyed value, as something a term may be per."""
    if not batches:
        return {}
    own = {"examples", "answers"}
    return {name: float(value.sum()) for name, value in batches[0].step.items() if name not in own}


def _to_host(
    batch: PackedBatch, values: Mapping[str, Tensor]
) -> list[tuple[int, int, dict[str, Tensor]]]:
    """For each example: its row number, its number of answers, its values [1] or [answers]."""
    host = {name: value.detach().cpu() for name, value in values.items()}
    parts, answers = [], 0
    for place, (row, (_, lengths)) in enumerate(zip(batch.rows, batch.spans, strict=True)):
        count = len(lengths)
        own = {}
        for name, value in host.items():
            if batch.num_examples == batch.num_answers or len(value) == batch.num_examples:
                own[name] = value[place : place + 1]
            else:
                own[name] = value[answers : answers + count]
        parts.append((row, count, own))
        answers += count
    return parts


def _with_step(
    batch: PackedBatch, whole: Mapping[str, Tensor], places: Mapping[int, int], first: Sequence[int]
) -> PackedBatch:
    examples = [places[row] for row in batch.rows]
    answers = [
        first[place] + number
        for place, (_, lengths) in zip(examples, batch.spans, strict=True)
        for number in range(len(lengths))
    ]
    device = batch.tokens.device
    own = {
        "examples": torch.tensor(examples, dtype=torch.long, device=device),
        "answers": torch.tensor(answers, dtype=torch.long, device=device),
    }
    return attrs.evolve(batch, step=dict(whole) | own)


def _running_total(sizes: Sequence[int]) -> list[int]:
    totals = [0]
    for size in sizes:
        totals.append(totals[-1] + size)
    return totals
