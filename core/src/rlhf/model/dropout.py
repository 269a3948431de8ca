"""A model's noise: its dropout, and that of its routers. Preference losses compare two passes,
between which it would differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

ENDINGS = ("dropout", "pdrop", "dropout_p", "dropout_prob", "dropout_rate", "layerdrop")
"""Suffixes of module attributes and config fields that hold a dropout probability."""


def without_noise(module: Any) -> None:
    """Set every dropout of a PackedModel to 0, in its modules and in its config, and have routers
    choose experts as in evaluation. An adapter's own dropout stays, since the configuration sets it
    (`lora.dropout`)."""
    for name, part in module.model.named_modules():
        if "lora_dropout" in name.split("."):
            continue
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        _clear(part)
        if any("jitter" in field and value for field, value in vars(part).items()):
            part.train = MethodType(_train_only_parts, part)
            part.training = False
    config = module.causal.config
    settings = {id(each): each for each in (config, config.get_text_config())}.values()
    module.causal.published = [(each, dict(_shares(each))) for each in settings]
    for each in settings:
        _clear(each)


@contextmanager
def published_config(causal: Any) -> Iterator[None]:
    """In this block, let the config of a transformers model have the dropout that it was published
    with."""
    published = getattr(causal, "published", ())
    for settings, shares in published:
        vars(settings).update(shares)
    yield
    for settings, _ in published:
        _clear(settings)


def _train_only_parts(module: nn.Module, mode: bool = True) -> nn.Module:
    """`Module.train` of a module that keeps computing as in evaluation."""
    for part in module.children():
        part.train(mode)
    return module


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
