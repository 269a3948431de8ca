"""A trainer's own parameters at the head of a model: `extra` of `Run.load`.

They are parameters of the wrapper around the model, so a backend trains, shards and saves them like
any other. An exported model has them in a file of its own, which transformers does not read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from rlhf.config.sections import Config
from rlhf.errors import RLHFError, listed
from rlhf.folder.run_folder import EXTRA_FILE
from rlhf.model.architecture import resolved
from rlhf.model.stored import damage

EXTRA_PREFIX = "extra."
"""Prefix of their names in the state dict of a PackedModel."""


def first_values(config: Config, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values with which `extra` begins: those of the model or adapter that is trained
    further, if it has them. Raises RLHFError for a parameter that has another shape there, for a
    name that torch does not allow and for a scalar."""
    check_extra(extra)
    if not extra:
        return {}
    model = config.model
    source = model.adapter or resolved(model.path)
    saved = exported_extra(source, revision=None if model.adapter else model.revision)
    for name in sorted(saved.keys() & extra.keys()):
        if saved[name].shape != extra[name].shape:
            raise RLHFError(
                f"{source} has the parameter {name!r} of shape {list(saved[name].shape)}, but this "
                f"trainer's has {list(extra[name].shape)}; choose the model it was trained from"
            )
    return {name: saved.get(name, value).detach() for name, value in extra.items()}


def notes_on_extra(config: Config, extra: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield lines for the start of the run on parameters in the folder that is trained further that
    are not those of this trainer."""
    source = config.model.adapter or resolved(config.model.path)
    if not (Path(source) / EXTRA_FILE).is_file():
        return
    saved = exported_extra(source)
    if unused := sorted(saved.keys() - extra.keys()):
        yield f"extra      {source} has parameters that this trainer does not use: {listed(unused)}"
    if new := sorted(extra.keys() - saved.keys()):
        yield f"extra      {source} has no {listed(new)}, so this trainer's own values are used"


def check_extra(extra: Mapping[str, Tensor]) -> None:
    """Raise RLHFError for a name that torch does not allow, and for a scalar."""
    for name, value in extra.items():
        if "." in name or hasattr(nn.ParameterDict, name):
            raise RLHFError(
                f"run.load(): an extra parameter cannot have the name {name!r}; rename it"
            )
        if not value.dim():
            # DeepSpeed cannot broadcast a scalar.
            raise RLHFError(
                f"run.load(): the extra parameter {name!r} is a scalar; give it the shape [1]"
            )


def exported_extra(folder: Path | str, *, revision: str | None = None) -> dict[str, Tensor]:
    """Return the trainer's own parameters in a model folder or a model on the hub, by name; none if
    it has none."""
    file = cached_file(
        str(folder),
        EXTRA_FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return {}
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise RLHFError(f"{file} {damage(Path(file))}") from error


def save_extra(weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write whole parameters to their file in a model folder."""
    if weights:
        (directory / EXTRA_FILE).parent.mkdir(exist_ok=True)
        values = {name: value.detach().contiguous() for name, value in weights.items()}
        save_file(values, directory / EXTRA_FILE)
