"""What a checkpoint holds: the engines, the run's own state, and the random generators."""

from pathlib import Path
from typing import Any

from rlhf.errors import SameOnAllRanks
from rlhf.folder import checkpoints
from rlhf.loop import random_state
from rlhf.loop.session import Session


def save(session: Session, step: int) -> None:
    """Write the checkpoint of `step`, complete or not at all, then remove old ones. Collective."""
    mesh, engine = session.mesh, session.engine
    if session.folder is not None:
        part = checkpoints.begin(session.checkpoints, step)
        for role in (engine.role, *(follower.role for follower in session.followers)):
            (part / role).mkdir()
    mesh.barrier()
    part = checkpoints.part_folder(session.checkpoints, step)
    session.hooks.save_checkpoint(
        engine=engine, directory=part / engine.role, state=_state(session, step)
    )
    for follower in session.followers:
        follower.save(part / follower.role)
    random_state.save(part / f"rng-{mesh.rank:05d}.pt", mesh.device)
    mesh.barrier()
    shares = mesh.gather(checkpoints.digest(part, share=mesh.rank, of=mesh.world))
    if session.folder is not None:
        files = {name: file for share in shares for name, file in share.items()}
        folder = checkpoints.commit(part, session.checkpoints, step, files)
        keep = session.config.checkpoint.keep
        checkpoints.rotate(session.checkpoints, keep=keep, spare=session.best.step)
        session.journal.checkpoint(step, folder)
    mesh.barrier()


def restore(session: Session, folder: Path) -> int:
    """Restore a checkpoint. Returns the steps that it has behind it. Collective."""
    engine = session.engine
    state = session.hooks.load_checkpoint(engine=engine, directory=folder / engine.role)
    _check_data(session, folder, state["data"])
    for follower in session.followers:
        follower.load(folder / follower.role)
    session.trainer.load_state(state["trainer"])
    session.journal.load_state(state)
    session.best.load_state(state["best"])
    session.evaluation_owed = state["owed"]
    random_state.load(folder / f"rng-{session.mesh.rank:05d}.pt", session.mesh.device)
    return int(state["step"])


def _state(session: Session, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "data": _data(session),
        "trainer": session.trainer.state(),
        **session.journal.state(),
        "best": session.best.state(),
        "owed": session.evaluation_owed,
    }


def _check_data(session: Session, folder: Path, saved: list[int]) -> None:
    """Raise if the training rows changed: the steps that remain were planned for the old ones."""
    if saved != _data(session):
        (rows, tokens), (rows_now, tokens_now) = saved, _data(session)
        raise SameOnAllRanks(
            f"{folder} was written in training on {rows:,} examples of {tokens:,} tokens but "
            f"data.train now has {rows_now:,} of {tokens_now:,}; bring the old rows back, or "
            "start again with --overwrite"
        )


def _data(session: Session) -> list[int]:
    """Return the number of training examples and of their tokens."""
    lengths = session.train_order.examples.lengths
    return [len(lengths), int(lengths.sum())]
