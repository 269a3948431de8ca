"""The public modules are all that plugins import, and `help` explains them."""

import ast
import importlib
import pydoc
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import attrs
import pytest

import rlhf
from rlhf.config.field_docs import field_docs
from rlhf.trainer import PackedBatch

ROOT = Path(__file__).parents[2]
PUBLIC = tuple(
    f"rlhf.{name}"
    for name in (
        *("cli", "plugin", "hookspecs", "errors", "trainer", "formats", "scorer", "readouts"),
        *("engine", "kernels", "rollouts", "preview"),
    )
)
DEVKIT = ROOT / "plugins/devkit"
"""Its kits make and watch whole runs, so it may import all of core, of exactly one version."""
BESIDE_CORE = {ROOT / "plugins/kernels/tests", ROOT / "plugins/rows/tests"}
"""The tests of kernels hold them against core's own layers, and those of row formats read files as
core does: of this no plugin sees anything."""
FILES = [
    path
    for path in sorted(ROOT.glob("plugins/*/*/**/*.py"))
    if not {DEVKIT, *BESIDE_CORE} & {*path.parents}
]
LIBRARIES = (
    *("rlhf_demo", "rlhf_devkit", "rlhf_distill", "rlhf_rows"),
    *("rlhf_rollouts.rewards", "rlhf_rollouts.reward_models", "rlhf_rollouts.settings"),
    *("rlhf_rollouts.on_policy", "rlhf_rollouts.ratios"),
)
"""What distributions of others import beside core."""
OURS = ("rlhf", *(name.partition(".")[0] for name in LIBRARIES))
OF_OTHERS = sorted([
    *DEVKIT.glob("src/*/templates/*/**/*.py"), *ROOT.glob("tests/third_parties/**/*.py")
])  # fmt: skip
"""What `rlhf new` writes, and methods of third parties."""


def imported(path: Path) -> Iterator[str]:
    """Yield every module of core that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "rlhf":
            names = [f"rlhf.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "rlhf")


def is_public(module: str) -> bool:
    """Return whether a plugin may import the module."""
    if module.removeprefix("rlhf.") in rlhf.__all__:  # `from rlhf import run`
        return True
    return module in PUBLIC


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "plugins")))
def test_plugins_and_their_tests_import_only_public_modules(path: Path) -> None:
    assert [name for name in imported(path) if not is_public(name)] == []


@pytest.mark.parametrize("path", OF_OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_others_write_imports_only_public_names(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            assert node.module in ("rlhf", *PUBLIC, *LIBRARIES)
            public = getattr(module, "__all__", vars(module))
            assert [each.name for each in node.names if each.name not in public] == []


def test_an_internal_module_is_not_public() -> None:
    assert not is_public("rlhf.data.batch")
    assert not is_public("rlhf.readouts.logprobs")
    assert not is_public("rlhf")


def test_the_devkit_needs_this_core_and_no_other() -> None:
    core = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    devkit = tomllib.loads((DEVKIT / "pyproject.toml").read_text())["project"]
    assert f"{core['name']}=={core['version']}" in devkit["dependencies"]


def test_help_shows_the_docstrings_of_fields() -> None:
    shown = pydoc.render_doc(PackedBatch, renderer=pydoc.plaintext)
    assert " |  tokens\n |      Token ids [T].\n" in shown


@pytest.mark.parametrize("module", [*PUBLIC, *LIBRARIES])
def test_every_field_of_a_public_class_has_a_docstring_that_help_shows(module: str) -> None:
    loaded = importlib.import_module(module)
    values = [getattr(loaded, name) for name in getattr(loaded, "__all__", vars(loaded))]
    for kind in values:
        if not isinstance(kind, type) or kind.__module__.split(".")[0] not in OURS:
            continue
        for field in attrs.fields(kind) if attrs.has(kind) else ():
            if not any(map(attrs.has, (field.type, *get_args(field.type)))):
                assert field_docs(kind).get(field.name), f"{kind.__name__}.{field.name}"
            # Else it is a section of the configuration, which has its own docstring.
        shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        names = attrs.fields_dict(kind) if attrs.has(kind) else field_docs(kind)
        bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in OURS]
        own = {name for base in bases for name in vars(base).get("__annotations__", ())}
        for name in names.keys() & field_docs(kind).keys() & own:
            assert field_docs(kind)[name] in shown, f"{kind.__name__}.{name}"
