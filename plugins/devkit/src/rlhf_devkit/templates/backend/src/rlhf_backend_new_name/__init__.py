"""The backend `new_name`: plain torch in one process. This module has its record and imports no
torch."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlhf.plugin import BackendPlugin


@frozen(kw_only=True)
class NewNameConfig:
    """Plain torch in one process. It has no settings yet."""


def defaults(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the changes of core's defaults."""
    return {"model.dtype": "fp32"}


plugin = BackendPlugin(
    config=NewNameConfig, hooks="rlhf_backend_new_name.backend:NewNameBackend", defaults=defaults
)
