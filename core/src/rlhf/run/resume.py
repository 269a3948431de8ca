"""Back to a checkpoint: the step, what comes after it, and the best model until then."""

from pathlib import Path

from rlhf.folder import checkpoints
from rlhf.loop.export import export_checkpoint, export_model
from rlhf.loop.save import restore
from rlhf.loop.session import Session
from rlhf.run.rank_zero import on_rank_zero


def resume(session: Session, checkpoint: Path) -> int:
    """Restore `checkpoint` and return its step; later checkpoints are set aside. Collective."""
    step = restore(session, checkpoint)
    later = on_rank_zero(
        session.mesh, lambda: checkpoints.set_aside(session.checkpoints, after=step)
    )
    lost = restore_best(session, step=step) if later else ""
    if session.folder is not None:
        aside = f"; {', '.join(later)} set aside until the next checkpoint" if later else ""
        name, to_go = checkpoints.name_of(checkpoint), session.num_steps - step
        print(f"resumed    {name}, {to_go:,} steps to go{aside}{lost}", flush=True)
    return step


def restore_best(session: Session, *, step: int) -> str:
    """Restore `model/` to the best evaluation up to `step`, which a later one may have replaced. If
    its checkpoint was deleted, the best is forgotten; returns a note that says so. Collective."""
    best = session.best
    if best.step is None:
        return ""
    if best.step == step:
        export_model(session)
        return ""
    folder = checkpoints.step_folder(session.checkpoints, best.step)
    if on_rank_zero(session.mesh, lambda: checkpoints.damage(folder)):
        best.forget()
        return f"; the best, {folder.name}, was deleted, so best-model tracking restarts"
    on_rank_zero(session.mesh, lambda: export_checkpoint(folder, session.path))
    return ""
