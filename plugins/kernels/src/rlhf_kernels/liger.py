"""Liger's modules of Triton kernels, imported without the rest of its package."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


@cache
def liger_module(name: str) -> ModuleType:
    """Return one of Liger's modules of Triton kernels. Importing their package would import all of
    its kernels, and let LIGER_KERNEL_IMPL replace these."""
    modules: dict[str, Any] = sys.modules
    hides_peft = "peft" not in modules
    if hides_peft:  # Liger's kernels do not need it.
        modules["peft"] = None
    try:
        import liger_kernel.utils
    finally:
        if hides_peft:
            del modules["peft"]
    liger_kernel.utils.PEFT_AVAILABLE = True  # Its models read this, which a plugin may use.
    return import_alone(f"liger_kernel.ops.{name}")


def import_alone(module: str) -> ModuleType:
    """Import a module without running its package's `__init__`, which may import much more. Unless
    the package is already imported, the module and what it imports from the package are private
    copies, absent from `sys.modules`."""
    package = module.rpartition(".")[0]
    if package in sys.modules:
        return import_module(module)
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    sys.modules[package] = module_from_spec(spec)
    try:
        return import_module(module)
    finally:
        for name in [*sys.modules]:
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]
