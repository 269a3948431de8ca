"""What commands import that look at a run without training: its rows, its steps, their memory, what
the backend and the kernels find on this machine, and whether plugins can be loaded."""

from rlhf.config.sections import DataEntry
from rlhf.data.files import Source
from rlhf.data.rows import load_format
from rlhf.memory.choice import advice, choose
from rlhf.memory.fit import StepFit
from rlhf.memory.rehearsal import NotRehearsed
from rlhf.model.accelerated import installed_kernels, load_kernels
from rlhf.registry.gateway import (
    build_backend,
    check_backend,
    hooks_class,
    load_backend,
    load_hooks,
)
from rlhf.registry.imports import check_trainer, demo_file, load_object, load_record
from rlhf.request.reader import config_class, trainer_defaults
from rlhf.train.dataset import Dataset, prepare_data
from rlhf.train.set_up import step_fit

__all__ = [
    "DataEntry",
    "Dataset",
    "NotRehearsed",
    "Source",
    "StepFit",
    "advice",
    "build_backend",
    "check_backend",
    "check_trainer",
    "choose",
    "config_class",
    "demo_file",
    "hooks_class",
    "installed_kernels",
    "load_backend",
    "load_format",
    "load_hooks",
    "load_kernels",
    "load_object",
    "load_record",
    "prepare_data",
    "step_fit",
    "trainer_defaults",
]
