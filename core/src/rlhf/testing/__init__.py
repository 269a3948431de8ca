"""What tests of plugins import: the conformance kit, a plain backend, pools of ranks, small runs.

Needs `rlhf-core[testing]`.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rlhf.testing needs pytest; run `pip install 'rlhf-core[testing]'`", name="pytest"
    ) from error

# Without it a failing assert of the kit shows no values in the tests of other distributions.
pytest.register_assert_rewrite(
    *(f"{__name__}.{file.stem}" for file in Path(__file__).parent.glob("[!_]*.py"))
)

if TYPE_CHECKING:
    from rlhf.contract.sums import weighted_loss
    from rlhf.data.packing import pack
    from rlhf.request.reader import read_config
    from rlhf.testing.backend_conformance import BackendConformance
    from rlhf.testing.bench import LIKELIHOOD, NUM_HELD_OUT, NUM_ROWS, layouts
    from rlhf.testing.conformance import Other, TrainerConformance
    from rlhf.testing.curves import column, without_timings
    from rlhf.testing.metrics import step_metrics
    from rlhf.testing.observed import call_hooks
    from rlhf.testing.observer_conformance import ObserverConformance
    from rlhf.testing.plain import PlainBackend
    from rlhf.testing.ranks import RankFailure, Ranks, ranks_fixture, shared
    from rlhf.testing.tiny import command, first_steps, make_model, run, short_run, write_rows

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
    "rlhf.testing.backend_conformance": ("BackendConformance",),
    "rlhf.testing.bench": ("LIKELIHOOD", "NUM_HELD_OUT", "NUM_ROWS", "layouts"),
    "rlhf.testing.conformance": ("Other", "TrainerConformance"),
    "rlhf.testing.curves": ("column", "without_timings"),
    "rlhf.testing.observer_conformance": ("ObserverConformance",),
    "rlhf.testing.plain": ("PlainBackend",),
    "rlhf.testing.ranks": ("RankFailure", "Ranks", "ranks_fixture", "shared"),
    "rlhf.testing.metrics": ("step_metrics",),
    "rlhf.testing.observed": ("call_hooks",),
    "rlhf.testing.tiny": (
        *("command", "first_steps", "make_model", "run", "short_run", "write_rows"),
    ),
}


def __getattr__(name: str) -> Any:
    # The processes of a pool import this package before they set what torch reads when it starts.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
