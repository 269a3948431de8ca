"""The survey: values of the whole optimizer step that a loss needs and that are not sums over
micro-batches."""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from rlhf.contract.calls import Contract
from rlhf.contract.checks import POSITIONS, Moment, check_names
from rlhf.contract.sums import Totals
from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.devices import on_device
from rlhf.engine import Mesh

EXAMPLES, ANSWERS = POSITIONS
"""Whether a surveyed value has one entry per example or per answer."""


@define
class Survey:
    """Runs a trainer's survey and gathers its values over micro-batches and ranks.

    Never synchronises with the device, except at the first step, and at the first one whose
    examples have several answers.
    """

    contract: Contract
    mesh: Mesh
    _checked: bool = False
    """Whether the names were compared between ranks."""
    _kinds: dict[str, str] = field(factory=dict)
    """`EXAMPLES` or `ANSWERS` for each surveyed value."""

    def batches(
        self,
        plan: StepPlan,
        packed: Sequence[PackedBatch],
        device: torch.device,
        moment: Moment | None = None,
    ) -> tuple[list[PackedBatch], Totals]:
        """Return the loss's micro-batches on `device` and the step's totals. `packed` are the
        survey's micro-batches, if `plan` has any, then the loss's. Collective.

        Each micro-batch has every surveyed value of the step in `batch.step`, in the order of
        `plan.rows`, with `examples` [E] and `answers` [A]: the positions of its own in those values
        (of the answers only if the survey's examples begin with the same ones).
        """
        batches = [batch.to(device) for batch in packed]
        if not self.contract.trainer.needs_survey():
            return batches, plan.totals
        num_seen = len(plan.survey)
        seen, batches = batches[:num_seen] or batches, batches[num_seen:]
        with torch.no_grad():
            by_batch = [self.contract.survey(batch, moment) for batch in seen]
        if not self._checked:
            check_names(by_batch, self.mesh, self.contract.trainer)
            self._checked = True
        local = {name: torch.cat([values[name] for values in by_batch]) for name in by_batch[0]}
        index = StepIndex(plan)
        positions = index.positions(*seen)
        kinds = self._agreed_kinds(local, index, positions)
        ranks = self.mesh.data
        whole = {
            name: ranks.sum(scattered(values, positions[kinds[name]], index.sizes[kinds[name]]))
            for name, values in local.items()
        }
        batches = [attrs.evolve(batch, step=whole | index.positions(batch)) for batch in batches]
        # In `batch.step`, `examples` and `answers` are positions; in the totals they are counts.
        return batches, {**batches[0].step, **plan.totals}

    def _agreed_kinds(
        self, local: Mapping[str, Tensor], index: "StepIndex", positions: Mapping[str, Tensor]
    ) -> Mapping[str, str]:
        """Return whether each value is per example or per answer. With one answer per example both
        are the same. Otherwise its length decides; on a rank whose examples all have one answer the
        lengths are equal, so the ranks exchange what they found, once. Collective then."""
        if index.one_answer:
            return dict.fromkeys(local, EXAMPLES)
        if local.keys() - self._kinds.keys():
            num_examples, num_answers = (len(positions[kind]) for kind in (EXAMPLES, ANSWERS))
            known = {
                name: EXAMPLES if len(values) == num_examples else ANSWERS
                for name, values in local.items()
                if num_examples != num_answers
            }
            for kinds in self.mesh.data.gather(known):
                self._kinds |= kinds
        return self._kinds


class StepIndex:
    """Positions of examples and answers in the order of a step, computed on the host."""

    def __init__(self, plan: StepPlan) -> None:
        self._position = {int(row): position for position, row in enumerate(plan.rows)}
        self._counts = plan.answers
        self._first = np.cumsum(plan.answers) - plan.answers
        self.one_answer = bool((plan.answers == 1).all())
        """Whether every example has one answer."""
        self.sizes = {EXAMPLES: len(plan.rows), ANSWERS: int(plan.answers.sum())}
        """Examples and answers of the whole step."""

    def positions(self, *batches: PackedBatch) -> dict[str, Tensor]:
        """Return the positions of the batches' examples and of their answers, in their order, on
        the device of the batches."""
        examples = [self._position[row] for batch in batches for row in batch.rows]
        answers = [
            int(self._first[position]) + number
            for position in examples
            for number in range(int(self._counts[position]))
        ]
        device = batches[0].tokens.device
        numbers = {EXAMPLES: examples, ANSWERS: answers}
        return {name: on_device(local, device).long() for name, local in numbers.items()}


def scattered(values: Tensor, positions: Tensor, size: int) -> Tensor:
    """Scatter values [n, ...] -> [size, ...], zero except at `positions` [n]. The sum of such
    tensors over all ranks is the whole step's."""
    whole = values.new_zeros(size, *values.shape[1:])
    return whole.index_copy_(0, positions, values.detach())
