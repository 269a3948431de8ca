"""A model's dropout: its size, and its removal. Preference losses compare two passes, between which
dropout would be noise."""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

ENDINGS = ("dropout", "pdrop", "dropout_p", "dropout_prob", "dropout_rate", "layerdrop")
"""Suffixes of module attributes and config fields that hold a dropout probability."""


def without_dropout(module: Any) -> None:
    """Set every dropout of a PackedModel to 0, in its modules and in its config, which is exported.
    An adapter's own dropout stays, since the configuration sets it (`lora.dropout`)."""
    for name, part in module.model.named_modules():
        if "lora_dropout" in name.split("."):
            continue
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        _clear(part)
    config = module.causal.config
    for settings in {id(each): each for each in (config, config.get_text_config())}.values():
        _clear(settings)


def largest_dropout(module: nn.Module) -> float:
    """Return the largest dropout probability in a module, adapters included."""
    shares = [part.p for part in module.modules() if isinstance(part, _DropoutNd)]
    shares += [value for part in module.modules() for _, value in _shares(part)]
    return max(shares, default=0.0)


def _clear(owner: nn.Module | Any) -> None:
    for name, _ in _shares(owner):
        setattr(owner, name, 0.0)


def _shares(owner: nn.Module | Any) -> list[tuple[str, float]]:
    return [(n, v) for n, v in vars(owner).items() if isinstance(v, float) and n.endswith(ENDINGS)]
