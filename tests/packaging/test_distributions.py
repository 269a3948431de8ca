"""Every distribution declares what it imports, and its tests need no file outside its folder."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from code_lines import code_lines

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
each_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)


def described(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text())


def metadata(project: Path) -> dict[str, Any]:
    return described(project)["project"]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


OURS = {metadata(project)["name"]: project for project in PROJECTS}
SOURCES = {name: next(project.glob("src/*")) for name, project in OURS.items()}


def declared(project: Path, *, extras: bool) -> set[str]:
    """Names of the distributions that come with this one; `extras` adds the optional ones.

    A distribution of ours brings its own requirements: they are part of what it promises.
    """
    listed = metadata(project)
    lines = list(listed.get("dependencies", []))
    if extras:
        optional = listed.get("optional-dependencies", {})
        lines += [line for name in optional if name != "all" for line in optional[name]]
    found = names(lines)
    return found.union(*(declared(OURS[name], extras=extras) for name in found & OURS.keys()))


def test_the_extra_all_brings_every_distribution_of_ours() -> None:
    extras = metadata(ROOT / "core")["optional-dependencies"]
    assert names(extras["all"]) == OURS.keys() - {"rlhf-core"}


OPTIONAL = {"flash_attn": {"flash-attn-4"}}
"""Names that the tests do not install and that differ from their distribution's."""


@cache
def providers() -> dict[str, set[str]]:
    """The distributions that install each top-level name."""
    installed = {
        name: {canonicalize_name(owner) for owner in owners}
        for name, owners in packages_distributions().items()
    }
    ours = {path.name: {name} for name, path in SOURCES.items()}
    return OPTIONAL | installed | ours


def imported(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file with the top-level names that it imports, standard library left out."""
    for file in sorted(folder.rglob("*.py")):
        # Distributions of their own, and what runs in an environment of vLLM's.
        if {"templates", "inside_vllm"} & set(file.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                yield file, name


def undeclared(project: Path, part: str, allowed: set[str]) -> list[str]:
    """Imports of `src` or `tests` of a project that no allowed distribution provides."""
    own = {path.stem for path in [*project.glob("src/*"), *project.glob("tests/*.py")]}
    owners = providers()
    return [
        f"{file.relative_to(project)} imports {name}"
        for file, name in imported(project / part)
        if name not in own and not allowed.intersection(owners.get(name, {canonicalize_name(name)}))
    ]


@each_project
def test_what_a_distribution_imports_is_declared(project: Path) -> None:
    assert undeclared(project, "src", declared(project, extras=True)) == []


@each_project
def test_the_tests_of_a_distribution_import_nothing_of_the_workspace(project: Path) -> None:
    allowed = declared(project, extras=True)
    for name in names(described(project).get("dependency-groups", {}).get("tests", [])):
        allowed |= {name} | (declared(OURS[name], extras=False) if name in OURS else set())
    assert undeclared(project, "tests", allowed) == []


def test_an_import_that_is_not_declared_is_named(tmp_path: Path) -> None:
    (tmp_path / "src" / "mine").mkdir(parents=True)
    (tmp_path / "src" / "mine" / "code.py").write_text("import os, mine\nfrom attrs import field")
    assert undeclared(tmp_path, "src", {"attrs"}) == []
    assert undeclared(tmp_path, "src", {"torch"}) == ["src/mine/code.py imports attrs"]


@pytest.mark.matrix
@each_project
def test_the_tests_of_a_distribution_are_complete(project: Path) -> None:
    # Every fixture must exist, which --setup-plan checks without running a test.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--setup-plan"]
    command += ["--rootdir", str(project), "--confcutdir", str(project), "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "tests"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


TRAINERS = [
    project for project in PROJECTS if "rlhf.trainers" in metadata(project).get("entry-points", {})
]


FORMATS = ("rewarded", "stepwise")


@pytest.mark.parametrize("project", TRAINERS, ids=lambda path: path.name)
def test_a_trainer_is_short(project: Path) -> None:
    # A row format is a plugin of its own.
    formats = {file for name in FORMATS for file in project.glob(f"src/*/{name}.py")}
    files = {*project.glob("src/*/*.py")} - formats
    most = {"dpo": 350, "grpo": 672, "ilql": 300, "ppo": 410, "prm": 267}.get(project.name, 250)
    assert sum(len(code_lines(file.read_text())) for file in files) <= most


def test_no_two_plugins_share_six_lines() -> None:
    owners: dict[tuple[str, ...], set[str]] = {}
    for project in PROJECTS[1:]:
        for file in project.glob("src/**/*.py"):
            lines = code_lines(file.read_text())
            for start in range(len(lines) - 5):
                owners.setdefault(tuple(lines[start : start + 6]), set()).add(project.name)
    assert len(owners) > 1000
    # Backends declare the same hooks, generation engines the same method.
    others = {
        each: names - {"devkit", "torch"}
        for each, names in owners.items()
        if "seeds: Sequence[int]," not in each
    }
    assert [(lines, names) for lines, names in others.items() if len(names) > 1] == []


@pytest.mark.parametrize(
    ("page", "root"), [("Dockerfile", "/src/"), ("docs/tutorial.md", "./")], ids=["image", "page"]
)
def test_folders_are_installed_with_all_that_they_require_of_ours(page: str, root: str) -> None:
    """No registry has these distributions, so that pip finds only what the command names."""
    text = (ROOT / page).read_text()
    found = re.findall(rf"(?<=\s){re.escape(root)}(core|plugins/\w+)(?=\s)", text)
    installed = {metadata(ROOT / path)["name"] for path in found}
    assert len(installed) > 7
    for name in installed:
        missing = (names(metadata(OURS[name])["dependencies"]) & OURS.keys()) - installed
        assert not missing, name
