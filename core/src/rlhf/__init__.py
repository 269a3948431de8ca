"""Pluggable post-training: a small core, a backend plugin, one plugin per workflow.

`from rlhf import read_config, run, export` is the command line from Python; `rlhf.api` has them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api import RLHFError, RunResult, export, read_config, run

__all__ = ["RLHFError", "RunResult", "export", "read_config", "run"]


def __getattr__(name: str) -> Any:
    """Return a name of `rlhf.api`, which the light parts of rlhf do without."""
    if name not in __all__:
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    from rlhf import api  # late: start-up time

    return getattr(api, name)
