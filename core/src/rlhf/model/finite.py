"""The first weight of a model with a value that is not finite."""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf.engine import Mesh
from rlhf.errors import SameOnAllRanks
from rlhf.model.packed import PREFIX, PackedModel
from rlhf.model.stored import StoredWeights, model_files
from rlhf.sharding import held


def check_finite(module: nn.Module, mesh: Mesh) -> None:
    """Raise RLHFError if a weight of a loaded model has NaN or infinity. Collective."""
    names = mesh.gather(next((n for n, p in module.named_parameters() if not is_finite(p)), None))
    # A rank at ZeRO-3 sees only its shards.
    first = next((name for name, _ in module.named_parameters() if name in names), None)
    if first is None:
        return
    name = first.removeprefix(PREFIX).removeprefix("base_model.model.").replace(".base_layer", "")
    raise SameOnAllRanks(
        f"{place_of(name, module)} has NaN or infinity in the weight {name}; download it again, or "
        "choose another one"
    )


def is_finite(parameter: Tensor) -> bool:
    """Return whether this rank's values of a parameter are finite, without a copy of them."""
    parts = [part.detach() for part in held(parameter) if part.numel()]
    extremes = [torch.stack(part.aminmax()) for part in parts if part.is_floating_point()]
    return all(bool(extreme.isfinite().all()) for extreme in extremes)


def place_of(name: str, module: nn.Module) -> str:
    """Return the file or the folder of a weight of a loaded model, in words."""
    if "lora_" in name:
        return "the adapter"
    causal: Any = module.causal if isinstance(module, PackedModel) else module
    path = getattr(getattr(causal, "config", None), "_name_or_path", "")
    file = StoredWeights(model_files(path, None)).files.get(name) if path else None
    return str(file or path or "the model")
