"""The one loop of every workflow: plan, survey, loss, step; evaluation, checkpoints and stops
between steps."""

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from attrs import frozen

from rlhf.data.batch import PackedBatch
from rlhf.data.loader import batches_from
from rlhf.data.order import StepPlan
from rlhf.engine import LaterOutcome, StepOutcome
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.journal.sums import Report, Sums, Totals, poison_unless_finite, weighted_loss
from rlhf.loop.export import export_model
from rlhf.loop.rollout import roll_out
from rlhf.loop.session import Session
from rlhf.loop.stop import StopWatch
from rlhf.loop.survey import StepTotals
from rlhf.loop.trace import StepTrace


@contextmanager
def settled_heap(device: torch.device) -> Iterator[None]:
    """In here Python's collector leaves alone what was there before."""
    settle_heap(device)
    try:
        yield
    finally:
        gc.unfreeze()


def settle_heap(device: torch.device) -> None:
    """Have Python's collector leave alone what is there by now: a full collection walks through all
    that the libraries hold, half a second in the middle of some step."""
    if device.type != "cpu":
        # Dead cycles would keep their tensors on the accelerator.
        gc.collect()
    gc.freeze()


def train(session: Session, *, first_step: int) -> str:
    """Train from `first_step` to the end of the schedule or an earlier stop. Returns why it ended:
    "done", "stop_at", "hours", "patience" or "signal". Collective."""
    folder, after = session.path / "traces", session.config.train.trace
    stop = StopWatch(session.config.train, session.mesh)
    trace = StepTrace(after, folder, session.mesh.rank, first_step=first_step)
    with settled_heap(session.engine.device), closing(stop), closing(trace):
        reason, step, evaluated = take_steps(session, stop, trace, first_step=first_step)
    if reason != "signal" and evaluated != step:
        evaluate_at_end(session, step=step)
    session.journal.flush()
    return reason


def take_steps(
    session: Session, stop: StopWatch, trace: StepTrace, *, first_step: int
) -> tuple[str, int, int | None]:
    """All steps, with what is due between them. Why they ended, after which, and after which of
    them the last evaluation was. Collective."""
    config, engine, order = session.config, session.engine, session.train_order
    source = batches_from(
        order,
        first_step=first_step,
        workers=0 if session.trainer.needs_rollout() else config.data.workers,
        pin=engine.device.type == "cuda",
    )
    if first_step == 0 and config.train.eval_at_start:
        evaluate(session, step=0)
    session.journal.start(first_step)
    reason, step, evaluated = None, first_step, None
    engine.train()
    if session.owed and _due(config.train.eval_every, step):
        reason, evaluated = make_up(session, step=step), step
    while step < session.num_steps and reason is None:
        trace.before(step)
        plan = order.step(step)
        if session.trainer.needs_rollout():
            plan, batches = roll_out(session.trainer, order, plan, session.mesh)
        else:
            batches = list(itertools.islice(source, plan.num_batches))
        report = take_step(session, plan, batches, step)
        if step == first_step:
            # Compilers come with the first step.
            settle_heap(engine.device)
        step += 1
        session.journal.step(step, plan, batches, report)
        reason = stop.reason(step)
        reason = "done" if step == session.num_steps else reason
        improved = False
        if reason is None and _due(config.train.eval_every, step):
            settle(session)
            improved, evaluated = improves(session, step=step), step
            reason = _impatient(session)
        session.owed = reason == "signal" and _due(config.train.eval_every, step)
        if reason is not None or improved or _due(config.checkpoint.every, step):
            settle(session)
            session.journal.flush()
            session.save(step)
    return reason or "done", step, evaluated


def make_up(session: Session, *, step: int) -> str | None:
    """The evaluation that was due when the run was stopped; "patience" if it was one too many.
    Collective."""
    session.owed = False
    improves(session, step=step)
    session.journal.flush()
    session.save(step)
    return _impatient(session)


def take_step(
    session: Session, plan: StepPlan, batches: list[PackedBatch], step: int
) -> Report | None:
    """One optimizer step on the survey's batches and the loss's; its metrics if this step is
    logged. Collective."""
    engine, trainer = session.engine, session.trainer
    batches, totals = surveyed(session, plan, batches)
    sums = Sums(session.mesh)
    for number, batch in enumerate(batches, start=1):
        loss = trainer.loss(batch)
        weighted = weighted_loss(loss, totals)
        sums.add(loss, weighted)
        engine.backward(poison_unless_finite(weighted), last=number == len(batches))
    settle(session)
    rate = float(session.schedule.get_last_lr()[0])
    outcome = engine.step()
    session.taken = Taken(plan, batches, sums, outcome)
    if isinstance(outcome, StepOutcome):
        settle(session)
    session.journal.outcome(outcome, rate)
    for follower in session.followers:
        follower.after_step(step + 1)
    return sums.reduce(totals) if (step + 1) % session.config.train.log_every == 0 else None


@frozen
class Taken:
    """A step whose outcome may still be on its way."""

    plan: StepPlan
    batches: Sequence[PackedBatch]
    sums: Sums
    outcome: StepOutcome | LaterOutcome


def settle(session: Session) -> None:
    """Raise the error of the last step if its loss or gradient was not finite. Collective then."""
    taken, session.taken = session.taken, None
    if taken is None:
        return
    outcome = taken.outcome.read()
    if not outcome.moved and not outcome.skipped_by_scaler:
        raise not_finite(session, taken.plan, taken.batches, taken.sums, outcome.grad_norm)


def surveyed(
    session: Session, plan: StepPlan, given: Sequence[PackedBatch]
) -> tuple[list[PackedBatch], Totals]:
    """The loss's batches on the device, with what the survey found, and what is counted over the
    whole step. Collective."""
    batches = [batch.to(session.engine.device) for batch in given]
    if not session.trainer.needs_survey():
        return batches, plan.totals
    seen, batches = batches[: len(plan.survey)], batches[len(plan.survey) :]
    batches = session.survey.take(batches, plan, seen=seen)
    return batches, StepTotals(plan.totals, batches[0].step)


def evaluate(session: Session, *, step: int) -> None:
    """Every held-out row once, the same numbers on any number of ranks. Collective; nothing without
    eval data."""
    order, trainer, engine = session.eval_order, session.trainer, session.engine
    if order is None:
        return
    session.journal.evaluating()
    engine.eval()
    # Packed here: a fork beside live threads of the training's loader may never return.
    source = batches_from(order)
    sums, totals = Sums(session.mesh), dict[str, float]()
    for number in range(order.steps_per_epoch):
        plan = order.step(number)
        given = list(itertools.islice(source, plan.num_batches))
        batches, step_totals = surveyed(session, plan, given)
        for name, value in step_totals.items():
            totals[name] = totals.get(name, 0.0) + value
        with torch.no_grad():
            for batch in batches:
                sums.add_terms(trainer.loss(batch))
    session.journal.evaluated(step, sums.reduce(totals))
    engine.train()


def evaluate_at_end(session: Session, *, step: int) -> None:
    """The last evaluation, of weights that are saved already: should it fail, no step is lost. It
    counts for the best where an undisturbed run would have it too. Collective."""
    counts = step == session.num_steps or _due(session.config.train.eval_every, step)
    if session.best.metric is None or not counts:
        evaluate(session, step=step)
    else:
        improves(session, step=step)
        session.save(step)


def improves(session: Session, *, step: int) -> bool:
    """Evaluate, and whether this is the best evaluation so far, whose model is then exported before
    a checkpoint can say so. Collective."""
    evaluate(session, step=step)
    if not session.best.take(step, session.journal.last):
        return False
    export_model(session)
    return True


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
    return SameOnAllRanks(f"step {plan.step + 1}: {what}: {advice}")


def _impatient(session: Session) -> str | None:
    """Why to stop after an evaluation."""
    return "patience" if session.best.exhausted else None


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
