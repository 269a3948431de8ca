"""What a checkpoint holds: the engines, the run's own state, and the random generators."""

import json
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from rlhf.data.examples import Examples
from rlhf.errors import SameOnAllRanks
from rlhf.folder import checkpoints
from rlhf.loop import random_state
from rlhf.loop.fragments import SavedEngine, own_fragments, write_fragments, write_plain
from rlhf.loop.session import Session

RUN = "run.json"
RANDOM = "random-{:05d}.safetensors"


def save(session: Session, step: int) -> None:
    """Write the checkpoint of `step`, complete or not at all, then remove old ones. Collective."""
    mesh = session.mesh
    session.place.enter("checkpoint", step=step)
    if session.folder is not None:
        part = checkpoints.begin(session.checkpoints, step)
        for engine in session.saved_engines:
            (part / engine.role).mkdir()
    mesh.barrier()
    part = checkpoints.part_folder(session.checkpoints, step)
    checkpoints.digest(part, _write(session, part, step), rank=mesh.rank)
    mesh.barrier()
    if session.folder is not None:
        folder = checkpoints.commit(part, session.checkpoints, step)
        keep = session.config.checkpoint.keep
        checkpoints.rotate(session.checkpoints, keep=keep, spare=session.best.step)
        session.journal.checkpoint(step, folder)
    mesh.barrier()


def restore(session: Session, folder: Path) -> tuple[int, str]:
    """Restore a checkpoint. Returns the steps that it has behind it, and what another layout
    changes, in words. Collective."""
    mesh, state = session.mesh, _read(folder)
    for engine in session.saved_engines:
        session.hooks.restore_engine(engine=engine, saved=SavedEngine(folder / engine.role))
    restore_schedule(session.schedule, state["schedule"])
    session.trainer.load_state(state["trainer"])
    session.journal.load_state(state)
    session.best.load_state(state["best"])
    session.evaluation_owed = state["owed"]
    step, ranks = state["step"], state["ranks"]
    if ranks == mesh.world:
        random_state.load(folder / RANDOM.format(mesh.rank), mesh.device)
        return step, ""
    random_state.spread(session.config.train.seed, mesh.data.rank, step)
    return step, f"; saved by {ranks} rank{'s' * (ranks > 1)}: random numbers are drawn anew"


def check_data(folder: Path, train: Examples) -> None:
    """Raise if the training rows changed: the steps that remain were planned for the old ones."""
    saved, (rows, tokens) = _read(folder)["data"], _data(train)
    if saved != [rows, tokens]:
        raise SameOnAllRanks(
            f"{folder} was written in training on {saved[0]:,} examples of {saved[1]:,} tokens but "
            f"data.train now has {rows:,} of {tokens:,}; restore the old rows, or "
            "start again with --overwrite"
        )


def _write(session: Session, part: Path, step: int) -> list[Path]:
    """Write this rank's files of a checkpoint and return them."""
    mesh = session.mesh
    paths = [part / RANDOM.format(mesh.rank)]
    random_state.save(paths[0], mesh.device)
    if mesh.rank == 0:
        paths.append(part / RUN)
        paths[-1].write_text(json.dumps(_state(session, step), indent=1) + "\n")
    for engine in session.saved_engines:
        state = session.hooks.engine_state(engine=engine)
        if mesh.rank == 0:
            paths.append(write_plain(engine, state, part / engine.role))
        paths += write_fragments(own_fragments(state, mesh), part / engine.role, mesh.rank)
    return paths


def _state(session: Session, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "ranks": session.mesh.world,
        "data": _data(session.train_order.examples),
        "schedule": session.schedule.state_dict(),
        "trainer": session.trainer.state(),
        **session.journal.state(),
        "best": session.best.state(),
        "owed": session.evaluation_owed,
    }


def restore_schedule(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Restore a schedule, and the rates that it last gave its optimizer."""
    schedule.load_state_dict(state)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RUN).read_text())


def _data(train: Examples) -> list[int]:
    """Return the number of training examples and of their tokens."""
    return [len(train.lengths), int(train.lengths.sum())]
