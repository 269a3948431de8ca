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
    "rlhf.model.adapters", "torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo",
)  # fmt: skip
"""The last two are what a function under `torch.compile` imports, such as DeepSpeed's Muon."""
PLUGINS = {"backend": "hooks", "kernels": "kernels"}
"""The kinds of plugins that most runs import, and the field of their records that names them."""


def of_plugins() -> Iterator[str]:
    """Yield the modules of the installed plugins of these kinds."""
    for plugin in installed():
        if plugin.kind in PLUGINS:
            with suppress(RLHFError):
                yield getattr(load_record(plugin), PLUGINS[plugin.kind]).partition(":")[0]


for name in (*NAMES, *of_plugins()):
    with suppress(Exception):  # A run that needs it reports what is wrong.
        import_module(name)
