"""One process's part of a run: everything the loop needs, and saving and restoring it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field
from torch.optim.lr_scheduler import LRScheduler

from rlhf.config.sections import Config
from rlhf.data.order import RunOrder
from rlhf.engine import Engine, Mesh
from rlhf.errors import SameOnAllRanks
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import RunRecord
from rlhf.journal.speed import Speed
from rlhf.loop import random_state
from rlhf.loop.best import Best
from rlhf.loop.survey import Survey
from rlhf.reference.live import Follower
from rlhf.registry.gateway import BackendGateway
from rlhf.registry.observers import ObserverGateway
from rlhf.trainer import Trainer

if TYPE_CHECKING:
    from rlhf.journal.journal import Journal
    from rlhf.loop.steps import Taken


@define(kw_only=True)
class Session:
    """The live parts of a run on this rank."""

    record: RunRecord
    config: Config
    mesh: Mesh
    hooks: BackendGateway
    observers: ObserverGateway
    trainer: Trainer
    survey: Survey
    engine: Engine
    followers: Sequence[Follower] = ()
    """Frozen engines that move."""
    schedule: LRScheduler
    train_order: RunOrder
    eval_order: RunOrder | None
    num_steps: int
    speed: Speed
    path: Path
    """The run folder."""
    folder: RunFolder | None
    """Rank 0's hand on it; None on the other ranks."""
    best: Best
    owed: bool = False
    """Whether a signal left the evaluation out that was due after the last step."""
    taken: Taken | None = None
    """The last step, until its outcome is known."""
    journal: Journal = field(init=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`, whole or not at all, then remove the ones too many.
        Collective."""
        if self.folder is not None:
            part = checkpoint.begin(self.checkpoints, step)
            for role in (self.engine.role, *(follower.role for follower in self.followers)):
                (part / role).mkdir()
        self.mesh.barrier()
        part = checkpoint.part_folder(self.checkpoints, step)
        self.hooks.save_checkpoint(
            engine=self.engine, directory=part / self.engine.role, state=self._state(step)
        )
        for follower in self.followers:
            follower.save(part / follower.role)
        random_state.save(part / f"rng-{self.mesh.rank:05d}.pt", self.mesh.device)
        self.mesh.barrier()
        shares = self.mesh.gather(checkpoint.digest(part, share=self.mesh.rank, of=self.mesh.world))
        if self.folder is not None:
            files = {name: file for share in shares for name, file in share.items()}
            folder = checkpoint.commit(part, self.checkpoints, step, files)
            keep = self.config.checkpoint.keep
            checkpoint.rotate(self.checkpoints, keep=keep, spare=self.best.step)
            self.observers.on_checkpoint(run=self.record, step=step, directory=folder)
        self.mesh.barrier()

    def restore(self, folder: Path) -> int:
        """Go back to a checkpoint; the step that comes next (0-based). Collective."""
        state = self.hooks.load_checkpoint(engine=self.engine, directory=folder / self.engine.role)
        self._check_data(folder, state["data"])
        for follower in self.followers:
            follower.load(folder / follower.role)
        self.trainer.load_state(state["trainer"])
        self.journal.tokens_seen = state["tokens_seen"]
        self.journal.skipped = state["skipped"]
        self.best.load_state(state["best"])
        self.owed = state["owed"]
        random_state.load(folder / f"rng-{self.mesh.rank:05d}.pt", self.mesh.device)
        return int(state["step"])

    def _check_data(self, folder: Path, before: list[int]) -> None:
        """The steps that are to come were laid out for the rows of then."""
        if before != self._data():
            (rows, tokens), (rows_now, tokens_now) = before, self._data()
            raise SameOnAllRanks(
                f"{folder} was written in training on {rows:,} examples of {tokens:,} tokens and "
                f"data.train has {rows_now:,} of {tokens_now:,} now: bring the old rows back, or "
                "start again with --overwrite"
            )

    def _data(self) -> list[int]:
        """Examples to train on and their tokens."""
        lengths = self.train_order.examples.lengths
        return [len(lengths), int(lengths.sum())]

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "data": self._data(),
            "trainer": self.trainer.state(),
            "tokens_seen": self.journal.tokens_seen,
            "skipped": self.journal.skipped,
            "best": self.best.state(),
            "owed": self.owed,
        }
