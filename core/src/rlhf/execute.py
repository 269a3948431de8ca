"""One rank's run from the configuration to the exported model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import transformers
from attrs import frozen

from rlhf import checkpoint, random_state
from rlhf import folder as run_folder
from rlhf.best import Best
from rlhf.config.reader import Request, to_tree
from rlhf.config.sections import Config
from rlhf.data.order import RunOrder
from rlhf.data.tokenise import Examples, prepare
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, ToldByFirst
from rlhf.export import export_model
from rlhf.folder import RunFolder
from rlhf.gateway import BackendGateway, ObserverGateway, build_gateways, load_hooks
from rlhf.headroom import Headroom
from rlhf.journal import Journal
from rlhf.loop import train
from rlhf.model.load import load_tokenizer
from rlhf.places import writing
from rlhf.registry import load_object
from rlhf.run import Run
from rlhf.session import RunRecord, Session
from rlhf.speed import Speed, peak_of
from rlhf.trainer import Trainer

T = TypeVar("T")
STOPPED = 143
"""Exit code of a run that SIGTERM stopped and that has saved."""


@frozen(kw_only=True)
class Data:
    """The tokenised rows, and the trainer that turned them into trees."""

    trainer: Trainer
    train: Examples
    eval: Examples | None

    @property
    def parts(self) -> list[Examples]:
        """The rows to train on, and the held-out ones if there are any."""
        return [part for part in (self.train, self.eval) if part]

    @property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max(int(part.longest_path.max()) for part in self.parts)

    def num_steps(self, config: Config) -> int:
        """Optimizer steps of the whole schedule."""
        per_epoch = -(-len(self.train) // config.batch.size)
        return config.train.steps or per_epoch * config.train.epochs

    def eval_order(self, config: Config, mesh: Mesh) -> RunOrder | None:
        """Every held-out row once, or None without any."""
        if self.eval is None:
            return None
        return RunOrder.for_evaluation(self.eval, config, mesh, self.trainer)


def prepare_data(request: Request) -> Data:
    """Tokenise what is not in the cache yet; without a collective, so that no rank waits at a
    barrier."""
    config = request.config
    tokenizer = load_tokenizer(config)
    trainer = load_object(request.plugin.trainer, request.origin)(config.own, tokenizer)
    found = {
        which: prepare(config, trainer, tokenizer, which=which)
        for which in ("train", "eval")
        if getattr(config.data, which)
    }
    return Data(trainer=trainer, train=found["train"], eval=found.get("eval"))


def run_rank(request: Request, *, backend: Any = None) -> int:
    """The exit code of this rank: 0, or 143 when it was stopped by SIGTERM and has saved.

    `backend`, an object with hook implementations, stands in for the one that the configuration
    names.
    """
    config = request.config
    transformers.utils.logging.disable_progress_bar()
    hooks, observers = load_hooks(config) if backend is None else build_gateways(backend)
    data = prepare_data(request)
    mesh = hooks.setup_mesh(config=config)
    record = None
    try:
        path = on_first(mesh, lambda: run_folder.choose(request))
        resumed = on_first(mesh, lambda: run_folder.check_resumable(request, path))
        with writing(path), opened(mesh, path, fresh=resumed is None) as folder:
            session = set_up(request, data, mesh, hooks, observers, path, folder)
            record = session.record
            reason = carry_out(request, session, resumed)
    except BaseException as error:
        if mesh.rank == 0 and record is not None:
            observers.on_finish(run=record, error=error)
        if isinstance(error, torch.OutOfMemoryError):
            raise headroom(config, data, mesh, hooks).error(error) from error
        raise
    if mesh.rank == 0:
        observers.on_finish(run=record, error=None)
    hooks.close_mesh(mesh=mesh)
    if mesh.rank == 0 and request.demo and request.plugin.report is not None:
        load_object(request.plugin.report, request.origin)(config, path)
    return STOPPED if reason == "signal" else 0


def headroom(config: Config, data: Data, mesh: Mesh, hooks: BackendGateway) -> Headroom:
    """Whether a step of this run fits."""
    return Headroom(
        data.trainer, config, mesh, hooks, steps=data.num_steps(config), longest=data.longest,
        examples=data.parts,
    )  # fmt: skip


@contextmanager
def opened(mesh: Mesh, path: Path, *, fresh: bool) -> Iterator[RunFolder | None]:
    """The locked run folder on rank 0, None elsewhere."""
    folder = on_first(mesh, lambda: RunFolder(path, fresh=fresh), share=False)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def on_first(mesh: Mesh, act: Callable[[], T], *, share: bool = True) -> T:
    """What `act` gives on rank 0, on every rank (with `share` False on rank 0 alone, else None). An
    RLHFError there is raised everywhere, so that no rank waits for one that has ended.
    Collective."""
    value: T | None = None
    error: RLHFError | None = None
    if mesh.rank == 0:
        try:
            value = act()
        except RLHFError as problem:
            error = problem
    shared, message = mesh.gather((value if share else None, error and str(error)))[0]
    if error is not None:
        raise error
    if message is not None:
        raise ToldByFirst(message)
    return shared if share else value  # type: ignore[return-value]


def set_up(
    request: Request,
    data: Data,
    mesh: Mesh,
    hooks: BackendGateway,
    observers: ObserverGateway,
    path: Path,
    folder: RunFolder | None,
) -> Session:
    """Models, orders of rows and the journal. Collective."""
    config = request.config
    train_order = RunOrder.for_training(data.train, config, mesh, data.trainer)
    num_steps = data.num_steps(config)
    run = Run(
        config, data.trainer.tokenizer, mesh, hooks, steps=num_steps, longest=data.longest,
        examples=data.parts,
    )  # fmt: skip
    if folder is not None and mesh.device.type != "cpu":
        run.notes.append(headroom(config, data, mesh, hooks).line())
    data.trainer.setup(run)
    random_state.spread(config.train.seed, mesh.rank)
    engine = run.engines["policy"]
    session = Session(
        record=RunRecord(name=request.name, folder=path, config=config, steps=num_steps),
        config=config, mesh=mesh, hooks=hooks, observers=observers, trainer=data.trainer,
        engine=engine, followers=run.followers, schedule=run.schedule, train_order=train_order,
        eval_order=data.eval_order(config, mesh),
        num_steps=num_steps, path=path, folder=folder,
        best=Best(metric=config.checkpoint.best, patience=config.train.patience),
        speed=Speed(shape=run.shapes["policy"], peak=peak_of(mesh.device, mesh.world)),
    )  # fmt: skip
    session.journal = Journal(session)
    if folder is not None:
        folder.write_config(to_tree(config))
        folder.write_json(
            "plan.json",
            {
                role: attrs.asdict(plan)
                | {"task": run.tasks[role], "attention": str(run.attention[role])}
                for role, plan in run.plans.items()
            },
        )
        folder.write_versions(
            trainer=request.name, trust_remote_code=config.model.trust_remote_code
        )
        introduce(request, session, data, run)
    return session


def introduce(request: Request, session: Session, data: Data, run: Run) -> None:
    """The first lines: what runs, where and how."""
    config, mesh, shape = request.config, session.mesh, run.shapes["policy"]
    plan = run.plans["policy"]
    demo = (
        "demo: the embedded model and rows, since neither model nor data was given; " * request.demo
    )
    trainable = "" if shape.trainable == shape.parameters else f", {shape.trainable:,} trained"
    lines = [
        f"rlhf {request.name}  {demo}run folder {session.path}",
        f"devices    {mesh.world} x {mesh.device.type}",
        f"backend    {config.backend_name}: {plan.summary}",
        f"model      {config.model.path}: {shape.parameters:,} parameters{trainable}, "
        f"{plan.precision}{', random weights' * (config.model.init == 'random')}",
        f"attention  {run.attention['policy']}",
        f"data       train: {data.train.report}",
    ]
    if data.eval is not None:
        lines.append(f"           eval: {data.eval.report}")
    lines.append(
        f"steps      {session.num_steps:,} of {config.batch.size} rows, "
        f"{session.train_order.steps_per_epoch:,} per epoch"
    )
    remarks = data.trainer.remarks(data.train)
    print("\n".join([*lines, *run.notes, *request.notes, *remarks]), flush=True)


def carry_out(request: Request, session: Session, resumed: Path | None) -> str:
    """Resume, train, export. Returns why the training ended. Collective."""
    leads = session.folder is not None
    step = 0
    if resumed is not None:
        step = session.restore(resumed)
        if leads:
            later = checkpoint.set_aside(session.checkpoints, after=step)
            aside = f"; {', '.join(later)} set aside until the next checkpoint" if later else ""
            to_go = session.num_steps - step
            print(f"resumed    {resumed.name}, {to_go:,} steps to go{aside}", flush=True)
    elif request.resume is not None and leads:
        print(f"resumed    nothing: {session.path} holds no checkpoint, so this starts at step 0")
    judged = session.best.metric is None or session.best.seen == step
    ended = step == session.num_steps or session.best.exhausted
    if ended and judged and on_first(session.mesh, (session.path / "model").is_dir):
        if leads:
            print(f"nothing left to do: {session.path / 'model'} is finished", flush=True)
        return "done"
    if session.folder is not None:
        session.folder.cut_metrics(step)
    try:
        reason = train(session, first_step=step)
    finally:
        session.journal.close()
    if reason == "signal":
        if leads:
            print("stopped by SIGTERM after saving; go on with --resume", flush=True)
        return reason
    best = session.best
    if best.step is None:
        export_model(session)
    if leads:
        if reason == "patience":
            print(f"stopped    after {best.waited} evaluations without a better one", flush=True)
        of = "" if best.step is None else f", the best by {best}"
        print(f"model      {session.path / 'model'}{of}", flush=True)
    return reason
