"""The scorer of a model folder: that of the trainer that its config.json names."""

import json
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError
from rlhf.model.save import SCORED_BY
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.installed import find
from rlhf.scorer import Scorer


def open_scorer(folder: Path, *, device: str, dtype: Any) -> Scorer:
    """Return the scorer of a run's `model/` folder. Raises RLHFError for any other folder."""
    try:
        name = json.loads((folder / "config.json").read_text())[SCORED_BY]
    except (OSError, ValueError, KeyError):
        raise RLHFError(
            f"{folder} has no config.json that names a trainer with a scorer; pass the model/ "
            "folder of a run of rm or prm, or of another trainer with a scorer"
        ) from None
    plugin = find("trainer", name)
    trainer = load_object(load_record(plugin).trainer, plugin)
    if trainer.scorer is None:
        raise RLHFError(f"{plugin} has no scorer, so {folder} cannot be served")
    scorer: Scorer = trainer.scorer(folder, device=device, dtype=dtype)
    return scorer
