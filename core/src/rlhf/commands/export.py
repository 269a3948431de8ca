"""`rlhf export`: write a model folder from a checkpoint."""

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rlhf.errors import RLHFError
from rlhf.folder import checkpoints
from rlhf.folder.disk import new_folder
from rlhf.loop.export import write_model
from rlhf.model.role import POLICY


def export_command(source: str, output: str, role: str = POLICY) -> int:
    """Write the model of `role` to `output` from a checkpoint, or from the newest one of a run
    folder; returns 0."""
    disable_progress_bar()
    with new_folder(Path(output)) as target:
        folder = _checkpoint_folder(Path(source))
        write_model(folder, target, role)
    print(f"exported {folder} to {output}")
    return 0


def _checkpoint_folder(source: Path) -> Path:
    """Return the checkpoint that `source` names. Raises RLHFError if it is damaged."""
    inside = source / "checkpoints"
    folder = inside if inside.is_dir() else source.parent
    if folder != inside and not (source.parent.parent / "config.yaml").is_file():
        raise RLHFError(
            f"{source} is not a checkpoint of a run; pass RUN/checkpoints/step-NNNNNN or RUN"
        )
    remedy = f"export the previous one with rlhf export {folder}/{{}} OUT"
    name = "" if folder == inside else source.name
    checkpoint = checkpoints.find(folder, name, remedy=remedy)
    if checkpoint is None:
        raise RLHFError(f"{source} has no checkpoint yet; choose another run folder")
    return checkpoint
