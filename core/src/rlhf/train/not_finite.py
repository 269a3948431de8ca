"""The error of a step whose loss or gradient was not finite."""

import torch

from rlhf.errors import SameOnAllRanks
from rlhf.model.finite import check_finite
from rlhf.train.journal import StepResult
from rlhf.train.session import Session


def error_of(session: Session, taken: StepResult) -> SameOnAllRanks | None:
    """Return the error of a step that changed no weight of some role because it was not finite.
    Raises RLHFError if a weight was not finite before it. Collective only then."""
    outcomes = {role: outcome.read() for role, outcome in taken.outcomes.items()}
    for role, outcome in outcomes.items():
        if not outcome.moved and not outcome.skipped_by_scaler:
            for model in session.trained.values():
                check_finite(model.engine.module, session.mesh)
            cause = _cause(session, taken, outcome.grad_norm)
            moved = any(other.moved for other in outcomes.values())
            weight = f"weight of the {role}" if moved else "weight"
            advice = f"no {weight} was changed; look at these rows, or lower optim.lr"
            return SameOnAllRanks(f"step {taken.step}: {cause}: {advice}")
    return None


def _cause(session: Session, taken: StepResult, grad_norm: float) -> str:
    """Name the rows of the micro-batches whose loss was not finite, or all rows of the step.
    Collective."""
    losses = [
        (float(loss), rows)
        for loss, rows in zip(taken.losses, taken.plan.micro, strict=True)
        if not torch.isfinite(loss)
    ]
    parts = [part for share in session.mesh.data.gather(losses) for part in share]
    names = session.train_order.examples.names
    if parts:
        return f"the loss is {parts[0][0]} in {names(row for _, rows in parts for row in rows)}"
    rows = names(taken.plan.rows)
    return f"the loss is finite but the norm of its gradient is {grad_norm}, in {rows}"
