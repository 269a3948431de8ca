"""The metrics of a step, from a trainer and its batches."""

from collections.abc import Mapping, Sequence

from rlhf.contract.sums import Sums
from rlhf.data.batch import PackedBatch
from rlhf.engine import Mesh
from rlhf.trainer import Trainer


def step_metrics(
    trainer: Trainer, batches: Sequence[PackedBatch], totals: Mapping[str, float]
) -> dict[str, float]:
    """Return what a run reports of a step with these micro-batches: the loss, every metric by its
    name and what the trainer derives. `totals` are the counts of the step by name."""
    sums = Sums(Mesh())
    for batch in batches:
        sums.add_terms(trainer.loss(batch))
    return sums.reduce(totals).read(trainer.derive)
