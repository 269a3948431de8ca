"""The one loop of every workflow: steps, and between them evaluations, checkpoints and stops."""

import itertools
import time
from collections.abc import Iterator

from rlhf.data.batch import PackedBatch
from rlhf.data.loader import batches_from
from rlhf.data.order import StepPlan
from rlhf.errors import SameOnAllRanks
from rlhf.launch.garbage import collect
from rlhf.launch.signals import steps_are_over
from rlhf.loop.checkpointing import complete_if_written, finish, save
from rlhf.loop.evaluation import evaluate, evaluate_and_keep_best, evaluate_at_end, is_due
from rlhf.loop.session import Session
from rlhf.loop.stepper import Stepper
from rlhf.loop.stop import StopWatch


def train(session: Session, *, first_step: int) -> tuple[str, int]:
    """Train from `first_step` to the end of the schedule or an earlier stop. Returns why it ended,
    "done", "stop_at", "hours", "patience" or "signal", and the last step. Collective."""
    collect(session.engine.device.type)
    try:
        reason, step, evaluated = _take_steps(session, first_step=first_step)
    except SameOnAllRanks:
        finish(session)
        raise
    steps_are_over()
    if reason != "signal" and evaluated != step:
        evaluate_at_end(session, step=step)
    session.journal.flush()
    finish(session)
    return reason, step


def _take_steps(session: Session, *, first_step: int) -> tuple[str, int, int | None]:
    """Take all steps, with what is due between them. Returns why they ended, the last step, and
    the step of the last evaluation after `first_step`. Collective."""
    source = _planned_steps(session, first_step=first_step)
    session.journal.start()
    # Until all observers have started, a signal ends every rank at once: nothing is to be saved.
    session.mesh.barrier()
    stop = StopWatch(session.config, session.mesh, on_signal=session.journal.observers.hurry)
    stepper = Stepper(session)
    pause = _Pause(session, stop, stepper)
    with stop.caught:
        reason, step = pause.before_steps(first_step), first_step
        while step < session.record.steps and reason is None:
            began = time.perf_counter()
            result = stepper.take(*next(source))
            if step == first_step:
                _end_start(session)
            step += 1
            session.journal.step(result)
            reason = pause.after_step(step, seconds=time.perf_counter() - began)
        if reason == "signal":
            finish(session)  # Another signal does not interrupt it.
    return reason or "done", step, pause.evaluated


def _end_start(session: Session) -> None:
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


class _Pause:
    """What is due between two steps: an evaluation, then a checkpoint."""

    def __init__(self, session: Session, stop: StopWatch, stepper: Stepper) -> None:
        self.session, self.stop, self.stepper = session, stop, stepper
        self.evaluated: int | None = None
        """Step of the last evaluation after the first step."""

    def before_steps(self, step: int) -> str | None:
        """Evaluate what is due at the first step, and start the clock. Returns why no step follows.
        Collective."""
        session, train = self.session, self.session.config.train
        if step == 0 and train.eval_at_start:
            session.place.startup.enter("evaluation")
            evaluate(session, step=0)
        session.place.startup.enter("first step")
        session.journal.start_steps(step)
        session.train()
        reason = self.stop.stop_at(step)
        if session.evaluation_owed and is_due(train.eval_every, step):
            session.evaluation_owed = False
            _, patience = self._evaluate(step)
            reason = reason or patience
            save(session, step)
        return reason

    def after_step(self, step: int, *, seconds: float) -> str | None:
        """Evaluate and save if it is due after a step that took `seconds`. Returns why the run ends
        with it. Collective."""
        session = self.session
        complete_if_written(session)
        reason = self.stop.reason(step)
        reason = "done" if step == session.record.steps else reason
        best, due = False, is_due(session.config.train.eval_every, step)
        if reason is None and due:
            self.stepper.raise_if_not_finite()
            best, reason = self._evaluate(step)
        session.evaluation_owed = reason == "signal" and due
        if reason is not None or best or is_due(session.config.checkpoint.every, step):
            self.stepper.raise_if_not_finite()
            session.journal.flush()
            began = time.perf_counter()
            save(session, step)
            self.stop.check_timeout(seconds, time.perf_counter() - began)
        return reason

    def _evaluate(self, step: int) -> tuple[bool, str | None]:
        self.evaluated = step
        return evaluate_and_keep_best(self.session, step=step)


def _planned_steps(
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
