"""Imports what all ranks of tests need, in the one process of a session that becomes them by forks;
without a device."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from rlhf.errors import RLHFError
from rlhf.registry.imports import load_record
from rlhf.registry.installed import installed

NAMES = (
    "rlhf.train.rank", "transformers.models.llama.modeling_llama", "datasets",
    "torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo",
)  # fmt: skip
"""The last two are what a function under `torch.compile` imports, such as DeepSpeed's Muon."""


def of_backends() -> Iterator[str]:
    """Yield the modules with the hooks of the installed backends."""
    for plugin in installed():
        if plugin.kind == "backend":
            with suppress(RLHFError):
                yield load_record(plugin).hooks.partition(":")[0]


for name in (*NAMES, *of_backends()):
    with suppress(Exception):  # A run that needs it reports what is wrong.
        import_module(name)
