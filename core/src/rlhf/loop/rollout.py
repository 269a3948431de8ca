"""The door for on-policy methods: what the trainer makes of a step's examples is laid out, packed
and trained on in their place."""

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.layout import costs, layout
from rlhf.data.order import RunOrder, StepPlan
from rlhf.data.packing import PER_TOKEN, pack, value_kinds
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.trainer import Trainer


def roll_out(
    trainer: Trainer, order: RunOrder, plan: StepPlan, mesh: Mesh
) -> tuple[StepPlan, list[PackedBatch]]:
    """The step with the examples that `trainer.rollout` gives for its rows: their plan and this
    rank's micro-batches. Raises RLHFError where one is larger than the budget. Collective."""
    given = [order.examples[int(row)] for row in plan.rows]
    made = trainer.rollout(given, plan.step)
    assert len(made) == len(given), f"{len(made)} examples for {len(given)} rows"
    lengths = np.array([len(item.prompt) + sum(_answers(item)) for item in made])
    paths = np.array([len(item.prompt) + max(_answers(item)) for item in made])
    check_budget(order, plan, lengths)
    laid = layout(lengths, order.ranks, order.tokens, costs(lengths, paths))
    batches = [
        attrs.evolve(
            pack(made, places[order.rank].tolist(), round_to=order.round_to, at_most=order.tokens),
            rows=tuple(plan.rows[places[order.rank]].tolist()),
        )
        for places in laid
    ]
    numbers = [[plan.rows[places] for places in micro] for micro in laid]
    replaced = attrs.evolve(
        plan,
        lengths=lengths,
        paths=paths,
        answers=np.array([len(item.answers) for item in made]),
        totals=counted(batches, made, mesh),
        layout=numbers,
        micro=[micro[order.rank] for micro in numbers],
    )
    return replaced, batches


def check_budget(order: RunOrder, plan: StepPlan, lengths: np.ndarray) -> None:
    """Raise for an example that no micro-batch can hold; the same on every rank."""
    largest = int(lengths.argmax())
    if lengths[largest] > order.tokens:
        raise RLHFError(
            f"step {plan.step + 1}: with its new answer {order.examples.name(plan.rows[largest])} "
            f"has {lengths[largest]} tokens but batch.tokens is {order.tokens}: set batch.tokens "
            f"to at least {lengths[largest]}, or generate fewer tokens"
        )


def counted(
    batches: Sequence[PackedBatch], made: Sequence[Example], mesh: Mesh
) -> dict[str, float]:
    """What the terms of a loss are per, over all ranks. Collective."""
    per_token = [name for name, kind in value_kinds(made).items() if kind == PER_TOKEN]
    counts = [
        (
            batch.num_examples,
            batch.num_answers,
            len(batch.predict),
            sum(int((~batch.values[name].isnan()).sum()) for name in per_token),
        )
        for batch in batches
    ]
    own = torch.tensor(counts, dtype=torch.float64, device=mesh.device).sum(0)
    names = ("examples", "answers", "tokens", "labels")
    return dict(zip(names, mesh.sum(own).tolist(), strict=True))


def _answers(example: Example) -> list[int]:
    return [len(answer.tokens) for answer in example.answers]
