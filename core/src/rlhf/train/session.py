"""One process's part of a run: everything that the loop needs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from attrs import Factory, define

from rlhf.config.sections import Config
from rlhf.contract.calls import Contract
from rlhf.data.order import RunOrder
from rlhf.engine import Engine, Mesh
from rlhf.folder.run_folder import RunFolder
from rlhf.hookspecs import RunRecord
from rlhf.launch.places import Marker
from rlhf.model.role import Role
from rlhf.reference.live import Follower
from rlhf.registry.gateway import BackendGateway
from rlhf.train.best import Best
from rlhf.train.journal import Journal
from rlhf.train.rollout import Rollouts
from rlhf.train.survey import Survey
from rlhf.trainer import Sample, Trainer


class Writing:
    """This rank's part of a checkpoint while it is being written."""

    def __init__(
        self, write: Callable[[], None], *, step: int, best: int | None, background: bool
    ) -> None:
        self.step = step
        self.best = best
        """The step of the best evaluation when the checkpoint was taken."""
        self._end: Future[None] = Future()
        if background:
            # Not a thread of a pool: Python would wait for it when a second Ctrl-C ends the run.
            threading.Thread(target=self._run, args=(write,), daemon=True).start()
        else:
            self._run(write)

    @property
    def is_done(self) -> bool:
        """Whether the files are on disk or an error has ended the writing."""
        return self._end.done()

    def wait(self) -> None:
        """Wait for the end. Raises the error that ended the writing."""
        self._end.result()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)


@define(kw_only=True)
class Session:
    """The live parts of a run on this rank."""

    record: RunRecord
    config: Config
    """The resolved configuration; what was requested is `Request.config`."""
    mesh: Mesh
    hooks: BackendGateway
    trainer: Trainer
    trained: Mapping[str, Role]
    """The trained models by role, the policy among them."""
    followers: Sequence[Follower]
    """Weights that are not trained and move with others."""
    saved_engines: Sequence[Engine]
    """The engines whose weights change, which checkpoints hold."""
    frozen: Mapping[str, str]
    """Digests of the files with frozen weights, which checkpoints do not hold, by path."""
    contract: Contract = Factory(lambda it: Contract(it.trainer, it.trained), takes_self=True)
    """Calls the trainer's survey and loss."""
    survey: Survey = Factory(lambda it: Survey(it.contract, it.mesh), takes_self=True)
    make_room: Callable[[Literal["evaluation"]], AbstractContextManager[None]]
    """Returns the context of a phase in which no engine trains, whose states may be on the host."""
    sample: Callable[..., list[Sample]]
    """`rlhf.trainer.Run.sample`."""
    train_order: RunOrder
    eval_order: RunOrder | None
    rollouts: Rollouts | None
    """The steps of a trainer that makes new examples."""
    folder: RunFolder | None
    """The locked run folder on rank 0, None on the other ranks."""
    journal: Journal
    place: Marker
    best: Best
    checkpoint_bytes: int
    """Bytes of one checkpoint."""
    writing: Writing | None = None
    """The checkpoint that is being written."""
    evaluation_owed: bool = False
    """Whether a signal left out the evaluation that was due after the last step."""

    @property
    def engine(self) -> Engine:
        """The policy's engine."""
        return self.trained["policy"].engine

    def train(self) -> None:
        """Switch dropout and recomputation of the trained models on."""
        for model in self.trained.values():
            model.engine.train()

    def eval(self) -> None:
        """Switch dropout and recomputation of the trained models off."""
        for model in self.trained.values():
            model.engine.eval()

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.record.folder / "checkpoints"
