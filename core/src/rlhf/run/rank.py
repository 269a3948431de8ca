"""One rank's run from the configuration to the exported model."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks, first_line
from rlhf.folder import checkpoints as checkpoint
from rlhf.folder import run_folder as run_folder
from rlhf.folder.disk import writing
from rlhf.folder.run_folder import RunFolder
from rlhf.loop.export import export_checkpoint, export_model
from rlhf.loop.save import restore
from rlhf.loop.session import Session
from rlhf.loop.steps import train
from rlhf.registry.gateway import build_gateways, load_hooks
from rlhf.registry.load import load_object
from rlhf.request.reader import Request
from rlhf.run.dataset import prepare_data
from rlhf.run.set_up import out_of_memory, set_up

T = TypeVar("T")
STOPPED = 143
"""Exit code of a run that SIGTERM or Ctrl-C stopped and that has saved."""


def run_rank(request: Request, *, backend: Any = None, verified: bool = False) -> int:
    """The exit code of this rank: 0, or 143 when a signal stopped it and it has saved.

    `backend`, an object with hook implementations, stands in for the one that the configuration
    names. `verified` says that the checkpoint to resume from has been verified.
    """
    config = request.config
    transformers.utils.logging.disable_progress_bar()
    hooks, observers = load_hooks(config) if backend is None else build_gateways(backend)
    data = prepare_data(request)
    mesh = hooks.setup_mesh(config=config)
    record = None
    try:
        path = on_first(mesh, lambda: run_folder.choose(request))
        resumed = on_first(
            mesh, lambda: run_folder.check_resumable(request, path, verified=verified)
        )
        with writing(path), opened(mesh, path, fresh=resumed is None) as folder:
            session = set_up(request, data, mesh, hooks, observers, path, folder)
            record = session.record
            reason = carry_out(request, session, resumed)
    except BaseException as error:
        if mesh.rank == 0 and record is not None:
            observers.on_finish(run=record, error=error)
        if ran_out(error):
            raise out_of_memory(config, data, mesh, hooks, error) from error
        raise
    if mesh.rank == 0:
        observers.on_finish(run=record, error=None)
    hooks.close_mesh(mesh=mesh)
    if mesh.rank == 0 and request.demo and request.plugin.report is not None:
        report_on_demo(request, path)
    return STOPPED if reason == "signal" else 0


def report_on_demo(request: Request, path: Path) -> None:
    """Print the demo's report. The run has succeeded, so a report that fails costs one line."""
    try:
        load_object(str(request.plugin.report), request.origin)(request.config, path)
    except Exception as error:  # A plugin's code may raise anything.
        written = path / "errors" / "report.txt"
        written.parent.mkdir(exist_ok=True)
        written.write_text(traceback.format_exc())
        print(
            f"report     failed: {type(error).__name__}: {first_line(error)}; see {written}",
            flush=True,
        )


def ran_out(error: BaseException) -> bool:
    """Whether an accelerator had no memory left, whichever library says so."""
    said = isinstance(error, RuntimeError) and re.search("out of memory|ALLOC_FAILED", str(error))
    return isinstance(error, torch.OutOfMemoryError) or bool(said)


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
        raise SameOnAllRanks(message)
    return shared if share else value  # type: ignore[return-value]


def bring_back_best(session: Session, *, step: int) -> str:
    """After going back to `step`: `model/` of the best evaluation until then, which a later one may
    have replaced; where its checkpoint is gone the best is looked for anew, in words. Collective.
    """
    best = session.best
    if best.step is None:
        return ""
    if best.step == step:
        export_model(session)
        return ""
    folder = checkpoint.step_folder(session.checkpoints, best.step)
    if on_first(session.mesh, lambda: checkpoint.damage(folder)):
        text = f"; the best until then, {folder.name}, is gone, so the best is looked for anew"
        best.forget()
        return text
    on_first(session.mesh, lambda: export_checkpoint(folder, session.path))
    return ""


def carry_out(request: Request, session: Session, resumed: Path | None) -> str:
    """Resume, train, export. Returns why the training ended. Collective."""
    leads = session.folder is not None
    step = 0
    if resumed is not None:
        step = restore(session, resumed)
        later = on_first(
            session.mesh, lambda: checkpoint.set_aside(session.checkpoints, after=step)
        )
        lost = bring_back_best(session, step=step) if later else ""
        if leads:
            aside = f"; {', '.join(later)} set aside until the next checkpoint" if later else ""
            aside += lost
            to_go = session.num_steps - step
            print(
                f"resumed    {checkpoint.name_of(resumed)}, {to_go:,} steps to go{aside}",
                flush=True,
            )
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
            print("stopped by a signal after saving; continue with --resume", flush=True)
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
