"""Folders like site-packages with wheels of ours, and the command `rlhf` in them."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def build(folder: Path, projects: Iterable[Path] = PROJECTS) -> dict[str, Path]:
    """Build the wheels of these projects, and return them by the name of the project's folder."""
    wheels = {}
    for project in projects:
        made = WheelBuilder(str(project)).build(directory=str(folder / project.name))
        wheels[project.name] = Path(next(made))
    return wheels


def make_site(folder: Path, wheels: Iterable[Path], *, third_party: set[str] | None = None) -> Path:
    """Return a folder like site-packages with these wheels and third-party packages: those whose
    top-level names are given, or all."""
    # By this name dill knows what is installed and need not be sent to other processes.
    site = folder / "site-packages"
    site.mkdir(parents=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        ours = entry.name.startswith(("rlhf", "__editable__", "_rlhf", "_editable"))
        if not ours and (third_party is None or entry.name in third_party):
            (site / entry.name).symlink_to(entry)
    # pip does the same with a wheel of pure Python, in ten times the time.
    for wheel in wheels:
        with ZipFile(wheel) as packed:
            packed.extractall(site)
    return site


def required(lines: Iterable[str], extra: str = "") -> set[str]:
    """Return the names of all distributions that come with these requirements."""
    found: set[str] = set()
    waiting = [(Requirement(line), extra) for line in lines]
    while waiting:
        requirement, of = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        marker = requirement.marker
        if (marker and not marker.evaluate({"extra": of})) or name in found:
            continue
        found.add(name)
        try:
            more = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # Optional there, as triton is on some platforms.
        for each in ("", *requirement.extras):
            waiting += [(Requirement(line), each) for line in more]
    return found


def top_level(distributions: Iterable[str]) -> Iterator[str]:
    """Yield the names in site-packages that these distributions have installed."""
    for name in distributions:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        yield from {file.parts[0] for file in files if file.parts[0] != ".."}


def rlhf(site: Path, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter that sees only these packages."""
    return python("-m", "rlhf", *words, sites=[site], folder=folder)


def python(
    *words: str, sites: Iterable[Path], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that sees only the packages in `sites`."""
    base = getattr(sys, "_base_executable", sys.executable)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    first, *others = map(str, sites)
    env |= {"PYTHONPATH": os.pathsep.join([first, *others]), "PYTHONNOUSERSITE": "1"}
    env |= {"RLHF_CACHE": str(Path(first) / "cache")}
    return subprocess.run([base, *words], env=env, cwd=folder, capture_output=True, text=True)
