"""The one loop of every workflow: plan, survey, loss, step; evaluation, checkpoints and stops
between steps."""

import itertools
from collections.abc import Sequence

import torch

from rlhf.data.batch import PackedBatch
from rlhf.data.loader import StepPlan, batches_from
from rlhf.errors import RLHFError, ToldByFirst
from rlhf.session import Session
from rlhf.stop import StopWatch
from rlhf.sums import Report, Sums, Totals, poison_unless_finite, weighted_loss
from rlhf.survey import surveys, take_survey, totals_of


def train(session: Session, *, first_step: int) -> str:
    """Train from `first_step` to the end of the schedule or an earlier stop. Returns why it ended:
    "done", "stop_at", "hours" or "signal". Collective."""
    config, engine, order = session.config, session.engine, session.train_order
    stop = StopWatch(config.train, session.mesh)
    source = batches_from(
        order,
        first_step=first_step,
        workers=config.data.workers,
        pin=engine.device.type == "cuda",
    )
    if first_step == 0 and config.train.eval_at_start:
        evaluate(session, step=0)
    session.journal.start(first_step)
    reason, step = None, first_step
    engine.train()
    while step < session.num_steps and reason is None:
        plan = order.step(step)
        report = take_step(session, plan, list(itertools.islice(source, len(plan.micro))), step)
        step += 1
        session.journal.step(step, plan, report)
        reason = stop.reason(step)
        if step == session.num_steps:
            reason = "done"
        elif reason is None and _due(config.train.eval_every, step):
            evaluate(session, step=step)
        if reason is not None or _due(config.checkpoint.every, step):
            session.journal.flush()
            session.save(step)
    stop.close()
    if reason != "signal":
        evaluate(session, step=step)
    session.journal.flush()
    return reason or "done"


def take_step(
    session: Session, plan: StepPlan, batches: list[PackedBatch], step: int
) -> Report | None:
    """One optimizer step; its metrics if this step is logged. Collective."""
    engine, trainer = session.engine, session.trainer
    batches = [batch.to(engine.device) for batch in batches]
    totals: Totals = plan.totals
    if surveys(trainer):
        batches = take_survey(trainer, batches, plan.rows, session.mesh)
        totals = {**totals, **totals_of(batches)}
    sums = Sums(session.mesh)
    for number, batch in enumerate(batches, start=1):
        loss = trainer.loss(batch)
        weighted = weighted_loss(loss, totals)
        sums.add(loss, weighted)
        engine.backward(poison_unless_finite(weighted), last=number == len(batches))
    rate = float(session.schedule.get_last_lr()[0])
    outcome = engine.step()
    if not outcome.moved and not outcome.skipped_by_scaler:
        raise not_finite(session, plan, batches, sums, outcome.grad_norm)
    session.journal.outcome(outcome, rate)
    return sums.reduce(totals) if (step + 1) % session.config.train.log_every == 0 else None


def evaluate(session: Session, *, step: int) -> None:
    """Every held-out row once, the same numbers on any number of ranks. Collective; nothing without
    eval data."""
    order, trainer, engine = session.eval_order, session.trainer, session.engine
    if order is None:
        return
    session.journal.flush()
    engine.eval()
    # Packed here: a fork beside live threads of the training's loader may never return.
    source = batches_from(order)
    sums, totals = Sums(session.mesh), dict[str, float]()
    for number in range(order.steps_per_epoch):
        plan = order.step(number)
        batches = [batch.to(engine.device) for batch in itertools.islice(source, len(plan.micro))]
        step_totals: Totals = plan.totals
        if surveys(trainer):
            batches = take_survey(trainer, batches, plan.rows, session.mesh)
            step_totals = {**step_totals, **totals_of(batches)}
        for name, value in step_totals.items():
            totals[name] = totals.get(name, 0.0) + value
        with torch.no_grad():
            for batch in batches:
                sums.add_terms(trainer.loss(batch))
    session.journal.evaluated(step, sums.reduce(totals))
    engine.train()


def not_finite(
    session: Session,
    plan: StepPlan,
    batches: Sequence[PackedBatch],
    sums: Sums,
    grad_norm: float,
) -> RLHFError:
    """The error of a step whose loss or gradient is not finite, naming rows; the same on every
    rank. Collective."""
    found = [
        (float(loss), batch.rows)
        for loss, batch in zip(sums.losses, batches, strict=True)
        if not torch.isfinite(loss)
    ]
    shares = [part for share in session.mesh.gather(found) for part in share]
    names = session.train_order.row_names
    if shares:
        what = f"the loss is {shares[0][0]} in {names(row for _, rows in shares for row in rows)}"
    else:
        what = (
            f"the loss is finite but the norm of its gradient is {grad_norm}, in {names(plan.rows)}"
        )
    advice = "no weight was changed; look at these rows, or lower optim.lr"
    return ToldByFirst(f"step {plan.step + 1}: {what}: {advice}")


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
