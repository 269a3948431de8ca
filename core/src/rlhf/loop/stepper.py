"""One optimizer step: survey, losses, update; and the error of a step that was not finite."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlhf.data.batch import PackedBatch
from rlhf.data.order import StepPlan
from rlhf.engine import StepOutcome
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.journal.journal import StepResult
from rlhf.journal.names import NameCheck
from rlhf.journal.sums import Sums, by_role, poison_unless_finite, weighted_loss
from rlhf.loop.session import Session


class Stepper:
    """Takes optimizer steps, and keeps the last one until its outcome is known: a backend may
    report it only once the next step has begun."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = NameCheck(session.record.name, session.mesh)
        self._pending: StepResult | None = None
        self._checked = False
        """Whether each loss has been seen to be of its own model only."""

    def take(self, plan: StepPlan, packed: Sequence[PackedBatch]) -> StepResult:
        """Take the step of `plan` on `packed`: the survey's batches, if it has its own, then the
        loss's. Collective."""
        session, trained = self._session, self._session.trained
        session.place.enter("survey", step=plan.step + 1)
        batches, totals = session.survey.batches(plan, packed, session.engine.device)
        sums = Sums(session.mesh)
        for number, batch in enumerate(batches, start=1):
            session.place.enter("forward", batch=number)
            loss = session.trainer.loss(batch)
            losses = {role: weighted_loss(part, totals) for role, part in by_role(loss).items()}
            self._check_roles(losses)
            whole = torch.stack([*losses.values()]).sum()
            sums.add(loss, whole)
            session.place.enter("backward", batch=number)
            for role, part in losses.items():
                poisoned = poison_unless_finite(part, whole)
                trained[role].engine.backward(poisoned, last=number == len(batches))
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
        """Raise the error of the last step if its loss or gradient was not finite. Collective only
        then."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        outcomes = {role: outcome.read() for role, outcome in pending.outcomes.items()}
        for role, outcome in outcomes.items():
            if not outcome.moved and not outcome.skipped_by_scaler:
                moved = any(other.moved for other in outcomes.values())
                weight = f"weight of the {role}" if moved else "weight"
                raise _not_finite(self._session, pending, outcome.grad_norm, weight)

    def _check_roles(self, losses: Mapping[str, Tensor]) -> None:
        """Raise RLHFError unless each trained model has a loss, and in the first micro-batch unless
        that loss reaches its own weights only: another engine would not reduce their gradients."""
        trained, trainer = self._session.trained, f"trainer {self._session.record.name!r}"
        if losses.keys() != trained.keys():
            raise RLHFError(
                f"{trainer}: loss() returns terms for {' and '.join(sorted(losses))}, but the run "
                f"trains {' and '.join(sorted(trained))}; return a term for each of them"
            )
        if self._checked or len(losses) == 1:
            return
        owner = {
            id(item): role for role, model in trained.items()
            for item in model.engine.module.parameters()
        }  # fmt: skip
        for role, loss in losses.items():
            for other in {owner.get(id(item), role) for item in leaves(loss)} - {role}:
                raise RLHFError(
                    f"{trainer}: the loss of {role!r} depends on the weights of {other!r}; detach "
                    f"what it uses of them, or prepare both as one module"
                )
        self._checked = True


def leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that get a gradient of `loss`."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [function for function, _ in node.next_functions]


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
