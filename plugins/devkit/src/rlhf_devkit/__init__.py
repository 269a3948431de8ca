"""Test kits for trainers, backends and observers, a plain backend, pools of ranks, small runs."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:  # `rlhf new` does without it, and starts faster.
    import pytest

    # Without it a failing assert of a kit shows no values in the tests of other distributions.
    pytest.register_assert_rewrite(
        *(f"{__name__}.{file.stem}" for file in Path(__file__).parent.glob("[!_]*.py"))
    )

if TYPE_CHECKING:
    from rlhf.contract.sums import weighted_loss
    from rlhf.data.packing import pack
    from rlhf.request.reader import read_config
    from rlhf_devkit.backend_conformance import BackendConformance
    from rlhf_devkit.bench import LIKELIHOOD, NUM_HELD_OUT, NUM_ROWS, layouts
    from rlhf_devkit.conformance import Other, TrainerConformance
    from rlhf_devkit.curves import column, without_timings
    from rlhf_devkit.metrics import step_metrics
    from rlhf_devkit.observed import call_hooks
    from rlhf_devkit.observer_conformance import ObserverConformance
    from rlhf_devkit.plain import PlainBackend
    from rlhf_devkit.ranks import RankFailure, Ranks, ranks_fixture, shared
    from rlhf_devkit.tiny import command, first_steps, make_model, run, short_run, write_rows

__all__ = [
    "LIKELIHOOD",
    "NUM_HELD_OUT",
    "NUM_ROWS",
    "BackendConformance",
    "ObserverConformance",
    "Other",
    "PlainBackend",
    "RankFailure",
    "Ranks",
    "TrainerConformance",
    "call_hooks",
    "column",
    "command",
    "first_steps",
    "layouts",
    "make_model",
    "pack",
    "ranks_fixture",
    "read_config",
    "run",
    "shared",
    "short_run",
    "step_metrics",
    "weighted_loss",
    "without_timings",
    "write_rows",
]
_MODULES = {
    "rlhf.data.packing": ("pack",),
    "rlhf.contract.sums": ("weighted_loss",),
    "rlhf.request.reader": ("read_config",),
    "rlhf_devkit.backend_conformance": ("BackendConformance",),
    "rlhf_devkit.bench": ("LIKELIHOOD", "NUM_HELD_OUT", "NUM_ROWS", "layouts"),
    "rlhf_devkit.conformance": ("Other", "TrainerConformance"),
    "rlhf_devkit.curves": ("column", "without_timings"),
    "rlhf_devkit.observer_conformance": ("ObserverConformance",),
    "rlhf_devkit.plain": ("PlainBackend",),
    "rlhf_devkit.ranks": ("RankFailure", "Ranks", "ranks_fixture", "shared"),
    "rlhf_devkit.metrics": ("step_metrics",),
    "rlhf_devkit.observed": ("call_hooks",),
    "rlhf_devkit.tiny": (
        *("command", "first_steps", "make_model", "run", "short_run", "write_rows"),
    ),
}


def __getattr__(name: str) -> Any:
    # The processes of a pool import this package before they set what torch reads when it starts.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
