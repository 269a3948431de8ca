"""What commands import that look at a run without training: its rows, its steps, their memory, and
what the backend and the kernels find on this machine."""

from rlhf.memory.choice import advice, choose
from rlhf.memory.fit import StepFit
from rlhf.memory.rehearsal import NotRehearsed, checkpoint_bytes
from rlhf.model.accelerated import installed_kernels
from rlhf.registry.gateway import build_backend, load_backend, load_hooks
from rlhf.train.dataset import Dataset, prepare_data
from rlhf.train.set_up import step_fit

__all__ = [
    "Dataset",
    "NotRehearsed",
    "StepFit",
    "advice",
    "build_backend",
    "checkpoint_bytes",
    "choose",
    "installed_kernels",
    "load_backend",
    "load_hooks",
    "prepare_data",
    "step_fit",
]
