"""The loop of every workflow, from top to bottom: steps, and what is due between two of them."""

import itertools
import time
from collections.abc import Collection, Iterator, Sequence

import torch

from rlhf.contract.checks import Moment, after
from rlhf.contract.sums import (
    NameCheck,
    Sums,
    Totals,
    by_role,
    poison_unless_finite,
    total_of,
    weighted_loss,
)
from rlhf.data.batch import PackedBatch
from rlhf.data.loader import batches_from
from rlhf.data.order import RunOrder, StepPlan
from rlhf.engine import StepOutcome
from rlhf.errors import SameOnAllRanks
from rlhf.launch.garbage import collect
from rlhf.launch.signals import steps_are_over
from rlhf.model.finite import check_finite
from rlhf.train.checkpointing import complete_if_written, finish, save
from rlhf.train.exporting import export_model
from rlhf.train.journal import StepResult
from rlhf.train.samples import take_samples
from rlhf.train.session import Session
from rlhf.train.stop import StopWatch


def train(session: Session, *, first_step: int) -> tuple[str, int]:
    """Train from `first_step` to the end of the schedule or an earlier stop. Returns why it ended,
    "done", "stop_at", "hours", "patience" or "signal", and the last step. Collective."""
    collect(session.engine.device.type)
    loop = Loop(session)
    try:
        reason, step = loop.take_steps(first_step)
    except SameOnAllRanks:
        finish(session)
        raise
    steps_are_over()
    if reason != "signal" and loop.evaluated != step:
        evaluate_at_end(session, step=step)
    session.journal.flush()
    finish(session)
    return reason, step


class Loop:
    """Takes the steps of a run, and between them evaluates, saves and stops when it is due."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.evaluated: int | None = None
        """Step of the last evaluation after the first step."""
        self._stepper = Stepper(session)

    def take_steps(self, first_step: int) -> tuple[str, int]:
        """Take all steps. Returns why they ended, and the last one. Collective."""
        session = self.session
        planned = planned_steps(session, first_step=first_step)
        session.journal.start()
        # Until all observers have started, a signal ends every rank at once: there is nothing to
        # save yet.
        session.mesh.barrier()
        stop = StopWatch(session.config, session.mesh, on_signal=session.journal.observers.hurry)
        with stop.caught:
            reason, step = self._start(first_step, stop), first_step
            while step < session.record.steps and reason is None:
                began = time.perf_counter()
                plan, batches = next(planned)
                result = self._stepper.take(plan, batches)
                if step == first_step:
                    end_start(session)
                step += 1
                session.journal.step(result)
                reason = self._pause(step, stop, seconds=time.perf_counter() - began)
            if reason == "signal":
                finish(session)  # Another signal does not interrupt it.
        return reason or "done", step

    def _start(self, step: int, stop: StopWatch) -> str | None:
        """Evaluate what is due before the first step, and start the clock. Returns why no step
        follows. Collective."""
        session, train = self.session, self.session.config.train
        if step == 0 and train.eval_at_start:
            session.place.startup.enter("evaluation")
            evaluate(session, step=0)
        session.place.startup.enter("first step")
        session.journal.start_steps(step)
        session.train()
        reason = stop.stop_at(step)
        if session.evaluation_owed and is_due(train.eval_every, step):
            session.evaluation_owed = False
            _, patience = self._evaluate(step)
            reason = reason or patience
            save(session, step)
        return reason

    def _pause(self, step: int, stop: StopWatch, *, seconds: float) -> str | None:
        """Evaluate, then save, if it is due after a step that took `seconds`. Returns why the run
        ends with it. Collective."""
        session = self.session
        complete_if_written(session)
        reason = stop.reason(step)
        reason = "done" if step == session.record.steps else reason
        best, due = False, is_due(session.config.train.eval_every, step)
        if reason is None and due:
            self._stepper.raise_if_not_finite()
            best, reason = self._evaluate(step)
        session.evaluation_owed = reason == "signal" and due
        if reason is not None or best or is_due(session.config.checkpoint.every, step):
            self._stepper.raise_if_not_finite()
            session.journal.flush()
            began = time.perf_counter()
            save(session, step)
            stop.check_timeout(seconds, time.perf_counter() - began)
        return reason

    def _evaluate(self, step: int) -> tuple[bool, str | None]:
        self.evaluated = step
        return evaluate_and_keep_best(self.session, step=step)


def planned_steps(
    session: Session, *, first_step: int
) -> Iterator[tuple[StepPlan, list[PackedBatch]]]:
    """Return the plan and this rank's micro-batches of each step from `first_step` on. Collective
    if the trainer makes new examples."""
    order, rollouts, numbers = session.train_order, session.rollouts, itertools.count(first_step)
    if rollouts is not None:
        return map(rollouts.step, numbers)
    session.place.enter("data", step=first_step + 1)
    source = batches_from(
        order,
        first_step=first_step,
        workers=session.config.data.workers,
        device=session.engine.device,
    )

    def step(number: int) -> tuple[StepPlan, list[PackedBatch]]:
        session.place.enter("data", step=number + 1)
        plan = order.step(number)
        return plan, list(itertools.islice(source, plan.num_batches))

    return map(step, numbers)


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
        moving = {name for name, it in trained.items() if plan.step >= it.spec.first_step}
        sums = sum_gradients(session, batches, totals, moment, moving)
        session.place.enter("update")
        self._names.check(sums)
        self.raise_if_not_finite()
        rates = {role: trained[role].learning_rate if role in moving else 0.0 for role in trained}
        outcomes = {
            role: model.engine.step() if role in moving else StepOutcome(moved=True, grad_norm=0.0)
            for role, model in trained.items()
        }
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
        if pending is not None and (error := error_of(self._session, pending)):
            raise error


def sum_gradients(
    session: Session,
    batches: Sequence[PackedBatch],
    totals: Totals,
    moment: Moment,
    moving: Collection[str],
) -> Sums:
    """Run forward and backward on the micro-batches, backward of the roles `moving`; return the
    sums of their losses and metrics. Collective."""
    sums = Sums(session.mesh)
    for number, batch in enumerate(batches, start=1):
        session.place.enter("forward", batch=number)
        loss = session.contract.loss(batch, totals, moment)
        losses = {role: weighted_loss(part, totals) for role, part in by_role(loss).items()}
        whole = torch.stack([*losses.values()]).sum()
        sums.add(loss, whole)
        session.place.enter("backward", batch=number)
        for role in (role for role in losses if role in moving):
            # Sequence ranks have the same loss, and gradients are summed over them.
            share = poison_unless_finite(losses[role], whole) / session.mesh.sequence.size
            session.trained[role].engine.backward(share, last=number == len(batches))
    return sums


def end_start(session: Session) -> None:
    """Do what is due once, after the first step. Collective."""
    collect(session.engine.device.type)
    session.place.startup.enter("steps")
    if session.folder is not None:
        # The start ends with the first step as the host sees it.
        session.folder.write_summary(startup=session.place.startup.seconds)
    if session.mesh.tensor.size == 1:
        # An optimizer whose states the backend cannot save fails here and not at the first
        # checkpoint. A tensor axis would gather the states.
        for role in session.trained.values():
            session.hooks.save_checkpoint(engine=role.engine)


def evaluate(session: Session, *, step: int) -> None:
    """Run every held-out row once; the numbers are the same on any number of ranks. Does nothing
    without eval data. Collective."""
    order = session.eval_order
    if order is None:
        return
    session.journal.start_evaluation()
    session.eval()
    with session.make_room("evaluation"):
        sums, totals = sums_over(order, session, step=step)
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


def sums_over(order: RunOrder, session: Session, *, step: int) -> tuple[Sums, dict[str, float]]:
    """Return the sums of the loss over all rows, and the totals that divide them. Collective."""
    sums, totals = Sums(session.mesh), dict[str, float]()
    moment = after(step, order.examples)
    for number in range(order.steps_per_epoch):
        if session.rollouts is None:
            plan = order.step(number)
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
