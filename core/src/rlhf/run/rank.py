"""One rank's run from the configuration to the exported model."""

import re
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf.errors import first_line
from rlhf.folder import run_folder
from rlhf.folder.disk import writing
from rlhf.loop.export import export_model
from rlhf.loop.session import Session
from rlhf.loop.steps import train
from rlhf.registry.gateway import build_gateways, load_hooks
from rlhf.registry.load import load_object
from rlhf.request.reader import Request
from rlhf.run.dataset import prepare_data
from rlhf.run.rank_zero import on_rank_zero, opened
from rlhf.run.resume import resume
from rlhf.run.set_up import out_of_memory, set_up

STOPPED = 143
"""Exit code of a run that SIGTERM or Ctrl-C stopped and that has saved."""


def run_rank(request: Request, *, backend: Any = None, verified: bool = False) -> int:
    """Run one rank and return its exit code: 0, or 143 if a signal stopped it and it has saved.

    `backend`, an object with hook implementations, replaces the one of the configuration. With
    `verified` the checkpoint to resume from has been verified.
    """
    config = request.config
    transformers.utils.logging.disable_progress_bar()
    hooks, observers = load_hooks(config) if backend is None else build_gateways(backend)
    data = prepare_data(request)
    mesh = hooks.setup_mesh(config=config)
    record = None
    try:
        path = on_rank_zero(mesh, lambda: run_folder.choose(request))
        resumed = on_rank_zero(
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


def carry_out(request: Request, session: Session, resumed: Path | None) -> str:
    """Resume, train, export. Returns why the training ended. Collective."""
    step = 0 if resumed is None else resume(session, resumed)
    tell = print if session.folder is not None else lambda *_, **__: None
    if resumed is None and request.resume is not None:
        tell(f"resumed    no checkpoint in {session.path}; starting at step 0")
    if is_finished(session, step):
        tell(f"nothing left to do: {session.path / 'model'} is finished", flush=True)
        return "done"
    if session.folder is not None:
        session.folder.cut_metrics(step)
    try:
        reason = train(session, first_step=step)
    finally:
        session.journal.close()
    if reason == "signal":
        tell("stopped by a signal after saving; continue with --resume", flush=True)
        return reason
    best = session.best
    if best.step is None:
        export_model(session)
    if reason == "patience":
        tell(f"stopped    after {best.waited} evaluations without a better one", flush=True)
    of = "" if best.step is None else f", the best by {best}"
    tell(f"model      {session.path / 'model'}{of}", flush=True)
    return reason


def is_finished(session: Session, step: int) -> bool:
    """Return whether a run that was restored at `step` has already written its model.
    Collective."""
    best = session.best
    judged = best.metric is None or best.seen == step
    ended = step == session.num_steps or best.exhausted
    return bool(ended and judged and on_rank_zero(session.mesh, (session.path / "model").is_dir))


def ran_out(error: BaseException) -> bool:
    """Return whether an accelerator ran out of memory, whichever library reports it."""
    reported = isinstance(error, RuntimeError) and re.search(
        "out of memory|ALLOC_FAILED", str(error)
    )
    return isinstance(error, torch.OutOfMemoryError) or bool(reported)


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
