"""One rank's run from the configuration to the exported model."""

import re
import shutil
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from rlhf.config.sections import Config
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks, counted, first_line
from rlhf.folder import checkpoints, retention, run_folder
from rlhf.folder.disk import writing
from rlhf.launch import places
from rlhf.launch.clock import Clock
from rlhf.launch.garbage import collect
from rlhf.launch.importing import importing
from rlhf.registry.gateway import BackendGateway, load_hooks
from rlhf.registry.imports import load_object
from rlhf.request.reader import Request
from rlhf.train.agreement import check_start
from rlhf.train.checkpointing import check_data, restore
from rlhf.train.dataset import Dataset, prepare_data
from rlhf.train.exporting import export_checkpoint, export_model, folder_of
from rlhf.train.loop import train
from rlhf.train.session import Session
from rlhf.train.set_up import out_of_memory, set_up


def run_rank(
    request: Request,
    *,
    backend: Any = None,
    observers: Mapping[str, object] = MappingProxyType({}),
    chosen: Path | None = None,
    verified: bool = False,
    startup: Clock | None = None,
) -> tuple[Path, str]:
    """Run one rank; returns the run folder and why the run ended, "signal" if one stopped it and it
    has saved.

    `backend`, an object with hook implementations, replaces the one of the configuration;
    `observers` join those of the configuration. `chosen` is the run folder, if the launcher has
    chosen it. With `verified` the checkpoint to resume from has been verified. `startup` is the
    clock of the run's start.
    """
    requested, startup = request.config, startup or Clock("set-up")
    transformers.utils.logging.disable_progress_bar()
    with startup.part("imports"), importing():
        hooks, watching = load_hooks(requested, backend, observers)
    with startup.part("tokenising"):
        data = prepare_data(request)
    session = None
    with process_group(requested, hooks) as mesh:
        data = of_one_day(request, data, mesh)
        check_start(request, data, mesh)
        path, resumed = choose_folder(request, data, mesh, chosen, verified=verified)
        try:
            with opened(path, mesh, startup, fresh=resumed is None) as (folder, place):
                session = set_up(request, data, mesh, hooks, watching, path, folder, place, resumed)
                reason = carry_out(request, session, resumed)
                if folder is not None:
                    place.phases.enter("ended")
                    folder.write_summary(ended=reason, seconds=place.phases.seconds)
        except BaseException as error:
            if mesh.rank == 0 and session is not None:
                watching.on_finish(run=session.record, error=error)
            if ran_out(error):
                raise out_of_memory(requested, data, mesh, hooks, error) from error
            if session is not None and lost_contact(error):
                raise RuntimeError(explain_loss(path, mesh.rank)) from error
            raise
        shutil.rmtree(path / run_folder.RANKS, ignore_errors=True)
        if mesh.rank == 0:
            watching.on_finish(run=session.record, error=None)
    reports = request.plugin.report is not None and reason != "signal"
    if mesh.rank == 0 and request.demo and reports:
        report_on_demo(request, path)
    return path, reason


@contextmanager
def process_group(config: Config, hooks: BackendGateway) -> Iterator[Mesh]:
    """Start the process group of a run, and end it. If the run failed, other ranks may still wait
    for this one, so only a group of one rank is ended before the process. Collective."""
    mesh = hooks.setup_mesh(config=config)
    # An earlier run in this process may have left its models there.
    collect(mesh.device.type)
    try:
        yield mesh
    except BaseException:
        if mesh.world == 1:
            hooks.close_mesh(mesh=mesh)
        raise
    hooks.close_mesh(mesh=mesh)


def of_one_day(request: Request, data: Dataset, mesh: Mesh) -> Dataset:
    """Return the rows with rank 0's day: another host may have started on the next day, or be in
    another time zone. Collective."""
    day = mesh.on_rank_zero(lambda: data.day)
    return data if data.day == day else prepare_data(request, day)


def choose_folder(
    request: Request, data: Dataset, mesh: Mesh, chosen: Path | None, *, verified: bool
) -> tuple[Path, Path | None]:
    """Return the run folder, which the launcher may have `chosen`, and the checkpoint to resume
    from, if any. Raises RLHFError if the run cannot be resumed. Collective."""
    path = mesh.on_rank_zero(lambda: chosen or run_folder.choose(request))
    resumed = mesh.on_rank_zero(
        lambda: run_folder.check_resumable(request, path, verified=verified)
    )
    if resumed is not None:
        check_data(resumed, data.train, mesh)
    return path, resumed


@contextmanager
def opened(
    path: Path, mesh: Mesh, startup: Clock, *, fresh: bool
) -> Iterator[tuple[run_folder.RunFolder | None, places.Marker]]:
    """Open the run folder, locked on rank 0 and None on others, and this rank's marker in it; close
    both. Collective."""
    with writing(path), ExitStack() as stack:
        folder = mesh.on_rank_zero(lambda: run_folder.RunFolder(path, fresh=fresh), share=False)
        if folder is not None:
            stack.enter_context(folder)
        check_shared(path, mesh)
        marker = places.Marker(path / run_folder.RANKS, mesh.rank, startup)
        yield folder, stack.enter_context(closing(marker))


def check_shared(path: Path, mesh: Mesh) -> None:
    """Raise RLHFError on every rank if a host does not have the run folder. Collective."""
    for host, present in mesh.gather((socket.gethostname(), path.is_dir())):
        if not present:
            raise SameOnAllRanks(
                f"{path} is not on host {host}; choose an --output that is the same folder on all "
                "hosts"
            )


def carry_out(request: Request, session: Session, resumed: Path | None) -> str:
    """Resume, train, export. Returns why the training ended. Collective."""
    step, line, folder = 0, "", session.record.folder
    if resumed is not None:
        step, line = resume(session, resumed)
    elif request.resume is not None:
        line = f"resumed    no checkpoint in {folder}; starting at step 0"
    best, steps = session.best, session.record.steps
    at_end = step >= (session.config.train.stop_at or steps)
    if (at_end or best.exhausted) and is_exported(session, step):
        say(session, f"nothing left to do: {folder / 'model'} is finished")
        return "patience" if best.exhausted else "done" if step == steps else "stop_at"
    say(session, line)
    limits, size = session.config.checkpoint, session.checkpoint_bytes
    say(session, session.mesh.on_rank_zero(lambda: retention.check_room(folder, size, limits)))
    if session.folder is not None:
        # An evaluation at the end is after the checkpoint, so that it is made again.
        session.folder.cut(step, evaluated=not (at_end or session.evaluation_owed))
    try:
        reason, step = train(session, first_step=step)
    finally:
        session.journal.close()
    if reason == "signal":
        say(session, "stopped by a signal after saving; continue with --resume")
    else:
        export_at_end(session, reason, step)
    return reason


def say(session: Session, line: str) -> None:
    """Print a line of the run, unless it is empty, on rank 0."""
    if line and session.folder is not None:
        print(line, flush=True)


def export_at_end(session: Session, reason: str, step: int) -> None:
    """Write the model, unless that of the best evaluation is there already, and say where it is.
    Collective."""
    best, record = session.best, session.record
    if best.step is None:
        export_saved(session)
        if session.folder is not None:
            session.folder.write_summary(exported=step)
    if reason == "patience":
        say(session, f"stopped    after {best.waited} evaluations without an improvement")
    if reason == "stop_at":
        at = f"at step {step:,} of {record.steps:,} by train.stop_at"
        say(session, f"stopped    {at}; remove it and pass --resume to continue")
    of = "" if best.step is None else f", the best by {best}"
    for role in sorted(session.trained.keys() - {"policy"}):
        say(session, f"{role:10} {record.folder / folder_of(role)}")
    say(session, f"model      {record.folder / 'model'}{of}")


def export_saved(session: Session) -> None:
    """Write the models of a step that has a checkpoint. Collective."""
    try:
        export_model(session)
    except RLHFError as error:
        text = f"{error}; the checkpoint is intact, run rlhf export on it"
        raise type(error)(text) from error


def is_exported(session: Session, step: int) -> bool:
    """Return whether a run that ends at `step` has written its model already, and not only that of
    an earlier end. Collective."""
    best, folder = session.best, session.record.folder
    if best.metric is not None and best.seen != step:
        return False

    def exported() -> bool:
        summary = run_folder.read_json(folder / "summary.json")
        # The model of the best evaluation is written before its checkpoint.
        written = best.step is not None or summary.get("exported") == step
        return written and (folder / "model").is_dir()

    return session.mesh.on_rank_zero(exported)


def resume(session: Session, checkpoint: Path) -> tuple[int, str]:
    """Restore `checkpoint`; later checkpoints are set aside. Returns its step and a line that says
    so. Collective."""
    step, layout = restore(session, checkpoint)
    later = session.mesh.on_rank_zero(
        lambda: checkpoints.set_aside(session.checkpoints, after=step)
    )
    lost = restore_best(session, step=step) if later else ""
    aside = f"; {', '.join(later)} set aside until the next checkpoint" if later else ""
    name, to_go = checkpoints.name_of(checkpoint), session.record.steps - step
    return step, f"resumed    {name}, {counted(to_go, 'step')} to go{aside}{lost}{layout}"


def restore_best(session: Session, *, step: int) -> str:
    """Restore `model/` to the best evaluation up to `step`, which a later one may have replaced. If
    its checkpoint was deleted, the best is forgotten; returns a note that says so. Collective."""
    best = session.best
    if best.step is None:
        return ""
    if best.step == step:
        export_saved(session)
        return ""
    folder = checkpoints.step_folder(session.checkpoints, best.step)
    if session.mesh.on_rank_zero(lambda: checkpoints.damage(folder)):
        best.forget()
        return f"; the best, {folder.name}, was deleted, so best-model tracking restarts"
    session.mesh.on_rank_zero(lambda: export_checkpoint(folder, session.record.folder))
    return ""


def ran_out(error: BaseException) -> bool:
    """Return whether an accelerator ran out of memory, whichever library reports it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    reported = "out of memory|ALLOC_FAILED"
    return isinstance(error, RuntimeError) and re.search(reported, str(error)) is not None


def lost_contact(error: BaseException) -> bool:
    """Return whether a collective failed: a rank has ended, or did not come in time."""
    if isinstance(error, torch.distributed.DistError):
        return True
    reported = "Connection (closed|reset)|Timed out waiting|timed out"
    return isinstance(error, RuntimeError) and re.search(reported, str(error)) is not None


def explain_loss(path: Path, rank: int) -> str:
    """Return which rank the others waited for. Writes the last collectives of this rank, as
    torch's flight recorder has them, into `errors/` of the run folder."""
    sentence = places.explain(places.read(path / run_folder.RANKS)) or "no rank ran"
    record = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if record is None:  # torch before 2.11
        return sentence
    text = record().decode()
    written = run_folder.write_error(path, f"collectives-rank-{rank}.json", text)
    return f"{sentence}; the last collectives of rank {rank} are in {written}"


def report_on_demo(request: Request, path: Path) -> None:
    """Print the demo's report. The run has succeeded, so a report that fails costs one line."""
    try:
        load_object(str(request.plugin.report), request.origin)(request.config, path)
    except Exception as error:  # A plugin's code may raise anything.
        written = run_folder.write_error(path, "report.txt", traceback.format_exc())
        print(
            f"report     failed: {type(error).__name__}: {first_line(error)}; see {written}",
            flush=True,
        )
