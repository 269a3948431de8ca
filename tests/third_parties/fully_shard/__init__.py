"""Weights in shards by torch's `fully_shard`. The record of the backend."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlhf.plugin import BackendPlugin


@frozen(kw_only=True)
class FullyShardConfig:
    """Weights, gradients and the optimizer's states in shards over all ranks, in fp32."""


def defaults(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the changes of core's defaults."""
    return {"model.dtype": "fp32"}


plugin = BackendPlugin(
    config=FullyShardConfig,
    hooks="rlhf_backend_fully_shard.backend:FullyShardBackend",
    defaults=defaults,
)
