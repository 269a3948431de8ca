"""The one way to patch DeepSpeed: targets are checked first, and modules are restored."""

import inspect
from contextlib import ExitStack
from typing import Any

from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.patches.table import NEWEST, PATCHES
from rlhf_plugin_deepspeed.versions import installed_version

run_scope = ExitStack()
"""What a run changes in the process: `close_mesh` closes it, which undoes the last change first."""


def replace(name: str, owner: Any, **replacements: Any) -> ExitStack:
    """Set attributes of `owner` as the patch `name` says; returns the context whose end undoes it.
    For a module or a class, `run_scope` ends it. Raises RLHFError as `check_target` does."""
    scope = ExitStack()
    new = {check_target(name, owner, attribute): it for attribute, it in replacements.items()}
    for attribute, replacement in new.items():
        if attribute in vars(owner):
            scope.callback(setattr, owner, attribute, vars(owner)[attribute])
        else:
            scope.callback(delattr, owner, attribute)
        setattr(owner, attribute, replacement)
    if inspect.ismodule(owner) or inspect.isclass(owner):
        run_scope.callback(scope.close)
    return scope


def check_target(name: str, owner: Any, attribute: str) -> str:
    """Return the name of an attribute of `owner`; that of a private one carries its class. Raises
    RLHFError if it is missing or takes other parameters than the patch `name` expects."""
    target = next(item for item in PATCHES[name].targets if path_of(item)[-1] == attribute)
    *_, parent, _ = path_of(target)
    actual_name = f"_{parent}{attribute}" if attribute.startswith("__") else attribute
    if not hasattr(owner, actual_name):
        raise RLHFError(_refusal(name, target, "is missing"))
    expected, function = parameters(target), getattr(owner, actual_name)
    if expected is not None:
        actual = [item for item in inspect.signature(plain(function)).parameters if item != "self"]
        if not fits(expected, actual):
            raise RLHFError(_refusal(name, target, f"takes ({', '.join(actual)})"))
    return actual_name


def path_of(target: str) -> list[str]:
    """Return a target of the table as the names that lead to it, its module first."""
    module, _, names = target.partition("(")[0].partition(":")
    return [module, *names.split(".")]


def parameters(target: str) -> list[str] | None:
    """Return the parameters that the table gives for a target, None where it is not a function."""
    _, bracket, inside = target.partition("(")
    return inside.rstrip(")").replace(",", " ").split() if bracket else None


def fits(expected: list[str], actual: list[str]) -> bool:
    """Return whether a function takes the `expected` parameters; those with `=` may be missing."""
    required = [item for item in expected if not item.endswith("=")]
    return actual in (required, [item.rstrip("=") for item in expected])


def plain(function: Any) -> Any:
    """Return the function under DeepSpeed's own decorators, which do not set `__wrapped__`."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "func" not in names:
        return function
    return plain(function.__closure__[names.index("func")].cell_contents)


def _refusal(name: str, target: str, problem: str) -> str:
    patch = PATCHES[name]
    remedy = f"install deepspeed {patch.oldest} to {NEWEST}"
    if patch.kind == "speed":
        remedy += " or set deepspeed.patches to correctness"
    return (
        f"deepspeed {installed_version()} does not fit the patch {name}: "
        f"{target.partition('(')[0]} {problem}; {remedy}"
    )
