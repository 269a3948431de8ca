"""What a checkpoint holds: the engines, the run's own state, and the random generators."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from rlhf.data.examples import Examples
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks, counted
from rlhf.folder import checkpoints, retention
from rlhf.train import random_state
from rlhf.train.fragments import (
    SavedEngine,
    copied_to_host,
    fragments_to_write,
    write_fragments,
    write_plain,
)
from rlhf.train.session import Session, Writing

RUN = "run.json"
RANDOM = "random-{:05d}.safetensors"


def save(session: Session, step: int) -> None:
    """Write the checkpoint of `step`, complete or not at all, then remove old ones. With
    `checkpoint.async` the files are written while the next steps run. Collective."""
    if session.rollouts is not None:
        session.rollouts.finish(step)
    session.place.enter("checkpoint", step=step)
    finish(session)
    if session.folder is not None:
        part = checkpoints.begin(session.checkpoints, step)
        retention.check_disk(session.checkpoints, session.checkpoint_bytes)
        for engine in session.saved_engines:
            (part / engine.role).mkdir()
    session.mesh.barrier()
    part = checkpoints.part_folder(session.checkpoints, step)
    background = session.config.checkpoint.async_
    write = _prepare(session, part, step, copied=background)
    session.writing = Writing(write, step=step, best=session.best.step, background=background)
    if not background:
        finish(session)


def finish(session: Session) -> None:
    """Wait until the checkpoint that is being written is complete. Collective."""
    writing = session.writing
    if writing is None and not session.config.checkpoint.async_:
        return
    # With `checkpoint.async`, `complete_if_written` may have set it to None on some ranks only.
    if writing is not None:
        writing.wait()
    session.mesh.barrier()
    session.writing = None
    session.mesh.on_rank_zero(lambda: _complete(session, writing), share=False)


def complete_if_written(session: Session) -> None:
    """Complete the checkpoint that is being written, once all ranks have written their files.
    Raises the error of this rank. Not collective."""
    writing = session.writing
    if writing is None or not writing.is_done:
        return
    writing.wait()
    part = checkpoints.part_folder(session.checkpoints, writing.step)
    if session.folder is None:
        session.writing = None
    elif checkpoints.digested(part, ranks=session.mesh.world):
        _complete(session, writing)
        session.writing = None


def _complete(session: Session, writing: Writing | None) -> None:
    if writing is None:
        return
    folder, limits = session.checkpoints, session.config.checkpoint
    complete = checkpoints.commit(folder, writing.step, ranks=session.mesh.world)
    retention.rotate(folder, keep=limits.keep, spare=writing.best, max_gb=limits.max_gb)
    observers = session.journal.observers
    observers.on_checkpoint(run=session.record, step=writing.step, directory=complete)


def restore(session: Session, folder: Path) -> tuple[int, str]:
    """Restore a checkpoint. Returns the number of its step, and what another layout changes, in
    words. Collective."""
    state = _read(folder)
    for engine in session.saved_engines:
        session.hooks.load_checkpoint(engine=engine, saved=SavedEngine(folder / engine.role))
    for role, schedule in schedules(session).items():
        restore_schedule(schedule, state["schedules"][role])
    session.trainer.load_state(state["trainer"])
    session.journal.load_state(state)
    session.best.load_state(state["best"])
    session.evaluation_owed = state["owed"]
    if session.rollouts is not None:
        session.rollouts.load(folder, state["step"])
    return state["step"], _restore_random(session, folder, state)


def _restore_random(session: Session, folder: Path, state: Mapping[str, Any]) -> str:
    """Restore the random generators of this rank; in another layout seed them, and return in words
    what differs."""
    mesh, ranks = session.mesh, state["ranks"]
    if (ranks, state.get("axes", [ranks, 1, 1])) == (mesh.world, _axes(mesh)):
        random_state.load(folder / RANDOM.format(mesh.rank), mesh.device)
        return ""
    random_state.seed_generators(session.config.train.seed, mesh.shards.rank, state["step"])
    by = counted(ranks, "rank")
    other = f"saved by {by}" if ranks != mesh.world else f"the {by} were divided in another way"
    return f"; {other}, so random numbers differ"


def check_data(folder: Path, train: Examples, mesh: Mesh) -> None:
    """Raise RLHFError if the training rows changed on any host: the steps that remain were planned
    for the old ones. Collective."""
    if problem := next(filter(None, mesh.gather(_changed_data(folder, train))), ""):
        raise SameOnAllRanks(problem)


def _changed_data(folder: Path, train: Examples) -> str:
    """Return how the rows differ from those of a checkpoint; an empty text if they do not."""
    saved, now = _read(folder)["data"], _data(train)
    # Checkpoints of earlier checkouts have no digests.
    if saved == now[: len(saved)]:
        return ""
    change = f"now has {now[0]:,} of {now[1]:,}"
    if saved[:2] == now[:2]:
        change = "now has as many with other content or in another order"
    return (
        f"{folder} was written in training on {counted(saved[0], 'example')} of {saved[1]:,} "
        f"tokens but data.train {change}; restore the old rows, or start again with --overwrite"
    )


def check_frozen(folder: Path, sources: Mapping[str, str]) -> None:
    """Raise RLHFError if frozen weights changed, which the checkpoint does not have: `sources` are
    digests of their files by path."""
    saved = _read(folder).get("frozen", {})
    for path, digest in sources.items():
        if saved.get(path, digest) != digest:
            raise RLHFError(
                f"{path} has other weights than when {folder} was written, which has no copy of "
                "these frozen weights; restore the old files or set model.revision to the old "
                "commit, or start again with --overwrite"
            )


def _prepare(session: Session, part: Path, step: int, *, copied: bool) -> Callable[[], None]:
    """Write the small files of a checkpoint, and return what writes this rank's large ones: of the
    engines as they are now if they are `copied`."""
    mesh = session.mesh
    paths = [part / RANDOM.format(mesh.rank)]
    random_state.save(paths[0], mesh.device)
    if mesh.rank == 0:
        paths.append(part / RUN)
        paths[-1].write_text(json.dumps(_state(session, step), indent=1) + "\n", encoding="utf-8")
        if session.rollouts is not None:
            paths += session.rollouts.save(part, step)
    parts = {}
    for engine in session.saved_engines:
        state = session.hooks.save_checkpoint(engine=engine)
        if mesh.rank == 0:
            paths.append(write_plain(engine, state, part / engine.role))
        own = fragments_to_write(state, mesh)
        parts[part / engine.role] = copied_to_host(own, mesh.device) if copied else own

    def write() -> None:
        for folder, fragments in parts.items():
            paths.extend(write_fragments(fragments, folder, mesh.rank))
        checkpoints.digest(part, paths, rank=mesh.rank)

    return write


def _axes(mesh: Mesh) -> list[int]:
    """Return the sizes of the mesh's axes. Random states belong to a rank's position on them."""
    return [mesh.data.size, mesh.sequence.size, mesh.tensor.size]


def _state(session: Session, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "ranks": session.mesh.world,
        "axes": _axes(session.mesh),
        "data": _data(session.train_order.examples),
        "frozen": dict(session.frozen),
        "schedules": {role: schedule.state_dict() for role, schedule in schedules(session).items()},
        "trainer": session.trainer.state(),
        **session.journal.state(),
        "best": session.best.state(),
        "owed": session.evaluation_owed,
    }


def schedules(session: Session) -> dict[str, LRScheduler]:
    """Return the schedules of the learning rates by role."""
    found = {role: model.schedule for role, model in session.trained.items()}
    return {role: schedule for role, schedule in found.items() if schedule is not None}


def restore_schedule(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Restore a schedule, and the rates that it last gave its optimizer."""
    schedule.load_state_dict(state)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RUN).read_text(encoding="utf-8"))


def _data(train: Examples) -> list[int | str]:
    """Return the number of training examples and of their tokens, and digests of their content."""
    return [len(train.lengths), int(train.lengths.sum()), *(file.content for file in train.files)]
