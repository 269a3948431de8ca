"""Dropout of a model: how much there is, and how it is taken out, since preference losses compare
two passes, which noise would make differ."""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

ENDINGS = ("dropout", "pdrop", "dropout_p", "dropout_prob", "dropout_rate", "layerdrop")
"""How attributes of modules and fields of configs end that hold a share to drop."""


def without_dropout(module: Any) -> None:
    """Set every dropout of a PackedModel's model to 0, in its modules and in its config, which is
    exported so. An adapter's own stays, since somebody asked for it (`lora.dropout`)."""
    for name, part in module.model.named_modules():
        if "lora_dropout" in name.split("."):
            continue
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        _clear(part)
    config = module.causal.config
    for settings in {id(found): found for found in (config, config.get_text_config())}.values():
        _clear(settings)


def largest_dropout(module: nn.Module) -> float:
    """The largest share that a module drops while it is trained, adapters' own among them."""
    shares = [part.p for part in module.modules() if isinstance(part, _DropoutNd)]
    shares += [value for part in module.modules() for _, value in _shares(part)]
    return max(shares, default=0.0)


def _clear(owner: nn.Module | Any) -> None:
    for name, _ in _shares(owner):
        setattr(owner, name, 0.0)


def _shares(owner: nn.Module | Any) -> list[tuple[str, float]]:
    found = vars(owner).items()
    return [(n, v) for n, v in found if isinstance(v, float) and n.endswith(ENDINGS)]
