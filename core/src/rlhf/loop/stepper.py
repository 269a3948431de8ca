"""One optimizer step: survey, losses, update; and the error of a step that was not finite."""

from collections.abc import Sequence

import torch

from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import StepOutcome
from rlhf.errors import SameOnAllRanks
from rlhf.journal.journal import StepResult
from rlhf.journal.names import NameCheck
from rlhf.journal.sums import Sums, Totals, by_role, poison_unless_finite, weighted_loss
from rlhf.loop.checks import Moment
from rlhf.loop.session import Session


class Stepper:
    """Takes optimizer steps, and keeps the last one until its outcome is known: a backend may
    report it only once the next step has begun."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = NameCheck(session.record.name, session.mesh)
        self._pending: StepResult | None = None

    def take(self, plan: StepPlan, packed: Sequence[PackedBatch]) -> StepResult:
        """Take the step of `plan` on `packed`: the survey's micro-batches, if `plan` has any, then
        the loss's. Collective."""
        session, trained = self._session, self._session.trained
        session.place.enter("survey", step=plan.step + 1)
        moment = Moment(f"step {plan.step + 1}", session.train_order.examples)
        batches, totals = session.survey.batches(plan, packed, session.engine.device, moment)
        sums = _sum_gradients(session, batches, totals, moment)
        session.place.enter("update")
        self._names.check(sums)
        self.raise_if_not_finite()
        rates = {role: model.learning_rate for role, model in trained.items()}
        outcomes = {role: model.engine.step() for role, model in trained.items()}
        logged = (plan.step + 1) % session.config.train.log_every == 0
        result = self._pending = StepResult(
            plan=plan, batches=packed, losses=sums.losses, outcomes=outcomes, learning_rates=rates,
            report=sums.reduce(totals) if logged else None,
        )  # fmt: skip
        if all(isinstance(outcome, StepOutcome) for outcome in outcomes.values()):
            self.raise_if_not_finite()
        for follower in session.followers:
            follower.after_step(result.step)
        return result

    def raise_if_not_finite(self) -> None:
        """Raise the error of a last step that was not finite. Collective only then."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        outcomes = {role: outcome.read() for role, outcome in pending.outcomes.items()}
        for role, outcome in outcomes.items():
            if not outcome.moved and not outcome.skipped_by_scaler:
                moved = any(other.moved for other in outcomes.values())
                weight = f"weight of the {role}" if moved else "weight"
                raise _not_finite(self._session, pending, outcome.grad_norm, weight)


def _sum_gradients(
    session: Session, batches: Sequence[PackedBatch], totals: Totals, moment: Moment
) -> Sums:
    """Run forward and backward on the micro-batches; return the sums of their losses and metrics.
    Collective."""
    sums = Sums(session.mesh)
    for number, batch in enumerate(batches, start=1):
        session.place.enter("forward", batch=number)
        loss = session.contract.loss(batch, totals, moment)
        losses = {role: weighted_loss(part, totals) for role, part in by_role(loss).items()}
        whole = torch.stack([*losses.values()]).sum()
        sums.add(loss, whole)
        session.place.enter("backward", batch=number)
        for role, part in losses.items():
            # Sequence ranks have the same loss, and gradients are summed over them.
            share = poison_unless_finite(part, whole) / session.mesh.sequence.size
            session.trained[role].engine.backward(share, last=number == len(batches))
    return sums


def _not_finite(
    session: Session, pending: StepResult, grad_norm: float, weight: str
) -> SameOnAllRanks:
    """Return the error of a step that was not finite. It names the rows of the micro-batches whose
    loss was not, or all rows of the step. Collective."""
    losses = [
        (float(loss), rows)
        for loss, rows in zip(pending.losses, pending.plan.micro, strict=True)
        if not torch.isfinite(loss)
    ]
    parts = [part for share in session.mesh.data.gather(losses) for part in share]
    names = session.train_order.examples.names
    if parts:
        problem = f"the loss is {parts[0][0]} in {names(row for _, rows in parts for row in rows)}"
    else:
        rows = names(pending.plan.rows)
        problem = f"the loss is finite but the norm of its gradient is {grad_norm}, in {rows}"
    advice = f"no {weight} was changed; look at these rows, or lower optim.lr"
    return SameOnAllRanks(f"step {pending.step}: {problem}: {advice}")
