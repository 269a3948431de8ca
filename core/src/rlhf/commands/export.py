"""`rlhf export`: a model folder made of a checkpoint."""

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rlhf.errors import RLHFError
from rlhf.folder import checkpoints
from rlhf.folder.disk import new_folder
from rlhf.loop.export import write_model


def export_command(source: str, output: str) -> int:
    """`rlhf export RUN/checkpoints/step-N OUT`, or a run folder for its newest checkpoint."""
    disable_progress_bar()
    with new_folder(Path(output)) as target:
        folder = _checkpoint_folder(Path(source))
        write_model(folder, target)
    print(f"exported {folder} to {output}")
    return 0


def _checkpoint_folder(source: Path) -> Path:
    """The checkpoint that `source` names, undamaged."""
    if (source / "checkpoints").is_dir():
        newest = checkpoints.newest(source / "checkpoints", remedy=_remedy(source / "checkpoints"))
        if newest is None:
            raise RLHFError(f"{source} holds no checkpoint yet: give another run folder")
        return newest
    if not (source.parent.parent / "config.yaml").is_file():
        raise RLHFError(
            f"{source} is no checkpoint of a run: give RUN/checkpoints/step-NNNNNN or RUN"
        )
    return checkpoints.named(source.parent, source.name, remedy=_remedy(source.parent))


def _remedy(checkpoints: Path) -> str:
    return f"export the previous one with rlhf export {checkpoints}/{{}} OUT"
