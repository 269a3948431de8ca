"""On-policy methods: the examples that a trainer's `rollout` returns for a step are laid out,
packed and trained on."""

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
    """Return the plan of the step with the examples of `trainer.rollout` in place of its rows, and
    this rank's micro-batches. Raises RLHFError for an example larger than the budget. Collective.
    """
    rows = [order.examples[int(row)] for row in plan.rows]
    examples = trainer.rollout(rows, plan.step)
    assert len(examples) == len(rows), f"{len(examples)} examples for {len(rows)} rows"
    spans = [(len(item.prompt), [len(each.tokens) for each in item.answers]) for item in examples]
    lengths = np.array([prompt + sum(answers) for prompt, answers in spans])
    paths = np.array([prompt + max(answers) for prompt, answers in spans])
    check_budget(order, plan, lengths)
    by_micro = layout(lengths, order.ranks, order.tokens, costs(lengths, paths))
    batches = []
    for by_rank in by_micro:
        places = by_rank[order.rank]
        batch = pack(examples, places.tolist(), round_to=order.round_to, at_most=order.tokens)
        batches.append(attrs.evolve(batch, rows=tuple(plan.rows[places].tolist())))
    numbers = [[plan.rows[places] for places in by_rank] for by_rank in by_micro]
    replaced = attrs.evolve(
        plan,
        lengths=lengths,
        paths=paths,
        answers=np.array([len(answers) for _, answers in spans]),
        totals=count(batches, examples, mesh),
        layout=numbers,
        micro=[by_rank[order.rank] for by_rank in numbers],
    )
    return replaced, batches


def check_budget(order: RunOrder, plan: StepPlan, lengths: np.ndarray) -> None:
    """Raise RLHFError for an example that no micro-batch can hold; the same on every rank."""
    largest = int(lengths.argmax())
    if lengths[largest] > order.tokens:
        raise RLHFError(
            f"step {plan.step + 1}: with its new answer {order.examples.name(plan.rows[largest])} "
            f"has {lengths[largest]} tokens but batch.tokens is {order.tokens}; set batch.tokens "
            f"to at least {lengths[largest]}, or generate fewer tokens"
        )


def count(
    batches: Sequence[PackedBatch], examples: Sequence[Example], mesh: Mesh
) -> dict[str, float]:
    """Return what the terms of a loss are per, over all ranks. Collective."""
    per_token = [name for name, kind in value_kinds(examples).items() if kind == PER_TOKEN]
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
    return dict(zip(names, mesh.data.sum(own).tolist(), strict=True))
