"""A base for backends on torch.distributed: `TorchBackend` implements all hooks in plain torch.

It is a library and no plugin: a backend's distribution depends on it. Only records are imported
before torch, so a record must not import this package.
"""

from rlhf_backend_torch.backend import TorchBackend
from rlhf_backend_torch.engine import TorchEngine

__all__ = ["TorchBackend", "TorchEngine"]
