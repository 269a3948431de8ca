"""Evaluation on the held-out rows, when it is due, and what follows from it."""

import torch

from rlhf.data.order import RunOrder
from rlhf.journal.names import NameCheck
from rlhf.journal.sums import Sums, total_of
from rlhf.loop.checkpointing import save
from rlhf.loop.checks import after
from rlhf.loop.exporting import export_model
from rlhf.loop.samples import take_samples
from rlhf.loop.session import Session


def evaluate(session: Session, *, step: int) -> None:
    """Run every held-out row once; the numbers are the same on any number of ranks. Does nothing
    without eval data. Collective."""
    order = session.eval_order
    if order is None:
        return
    session.journal.start_evaluation()
    session.eval()
    with session.make_room("evaluation"):
        sums, totals = _sums_over(order, session, step=step)
        samples = take_samples(session, step=step)
    NameCheck(session.record.name, session.mesh).check(sums)
    session.journal.evaluation(step, sums.reduce(totals), samples)
    session.train()


def evaluate_at_end(session: Session, *, step: int) -> None:
    """Evaluate weights that are saved already, so that a failure loses no step. The result counts
    for the best where a run without a stop would evaluate too. Collective."""
    if step != session.record.steps and not is_due(session.config.train.eval_every, step):
        evaluate(session, step=step)
        return
    evaluate_and_keep_best(session, step=step)
    if session.best.metric is not None:
        save(session, step)


def evaluate_and_keep_best(session: Session, *, step: int) -> tuple[bool, str | None]:
    """Evaluate; return whether this is the best evaluation so far, and "patience" if it ends the
    run. The best model is exported before a checkpoint can name it. Collective."""
    evaluate(session, step=step)
    best = session.best.update(step, session.journal.last)
    if best:
        export_model(session)
    return best, "patience" if session.best.exhausted else None


def is_due(every: int | None, step: int) -> bool:
    """Return whether something that happens `every` so many steps is due after `step` of them."""
    return every is not None and step % every == 0


def _sums_over(order: RunOrder, session: Session, *, step: int) -> tuple[Sums, dict[str, float]]:
    """Return the sums of the loss over all rows, and the totals that divide them. Collective."""
    sums, totals = Sums(session.mesh), dict[str, float]()
    moment = after(step, order.examples)
    for number in range(order.steps_per_epoch):
        if session.rollouts is None:
            plan = order.step(number)
            # In this process: a fork while threads of the training's loader run may never return.
            packed = [*map(order.__getitem__, plan.survey), *map(order.__getitem__, plan.micro)]
        else:
            session.place.enter("rollout", step=step)
            plan, packed = session.rollouts.held_out(order, number, step=step)
        session.place.enter("evaluation", step=step, batch=number + 1)
        batches, step_totals = session.survey.batches(plan, packed, session.engine.device, moment)
        for name in step_totals:
            totals[name] = totals.get(name, 0.0) + total_of(name, step_totals)
        with torch.no_grad():
            for batch in batches:
                sums.add_terms(session.contract.loss(batch, step_totals, moment))
    return sums, totals
