"""What is known of a model before any weight is read."""

import torch
from attrs import frozen

from rlhf.config.sections import Config
from rlhf.engine import ModelShape
from rlhf.model.packed import PackedModel, PathName
from rlhf.model.probe import candidates_of
from rlhf.model.shape import empty_model, shape_of
from rlhf.model.task import Task


@frozen
class Described:
    """A model without values, and how it could run packed batches."""

    module: PackedModel
    """The model on the meta device."""
    shape: ModelShape
    paths: tuple[PathName, ...]
    """Ways to run packed batches, the fastest first; the probe tries them on the live model."""
    reason: str
    """Why faster ways are left out."""


def describe(config: Config, task: Task, *, longest: int, device: torch.device) -> Described:
    """Return what is known of the model of `config` on `device`, for paths of up to `longest`
    tokens."""
    module = empty_model(config, task)
    paths, reason = candidates_of(module.causal, longest, device)
    return Described(module, shape_of(module), paths, reason)
