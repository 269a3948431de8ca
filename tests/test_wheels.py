"""What a user installs: the wheels of all distributions, and those of one trainer only."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
INSTALLED = ("core", "deepspeed", "dpo")
"""What a user of one trainer installs."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of every distribution, by the name of its folder."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o"]
    for project in PROJECTS:
        command = [*build, str(folder / project.name), str(project)]
        subprocess.run(command, check=True, capture_output=True)
    return {path.parent.name: path for path in folder.glob("*/*.whl")}


def make_site(folder: Path, wheels: Iterable[Path]) -> Path:
    """A folder like site-packages with the third-party packages and these wheels of ours."""
    # By this name dill knows what is installed and need not be sent to other processes.
    site = folder / "site-packages"
    site.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("rlhf", "__editable__", "_rlhf", "_editable")):
            (site / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(site), *map(str, wheels)], check=True)
    return site


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the core, the backend and one trainer, nothing else of ours."""
    return make_site(tmp_path_factory.mktemp("one"), [wheels[name] for name in INSTALLED])


@pytest.fixture(scope="module")
def whole_site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels."""
    return make_site(tmp_path_factory.mktemp("all"), wheels.values())


def rlhf(site: Path, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that sees these packages alone."""
    base = getattr(sys, "_base_executable", sys.executable)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1", "RLHF_CACHE": str(site / "cache")}
    command = [base, "-m", "rlhf", *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_the_plugins_of_the_wheels_are_found_and_no_others(site: Path) -> None:
    done = rlhf(site, "plugins")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert sorted(names) == ["deepspeed", "dpo"]


def test_every_plugin_of_all_wheels_loads(whole_site: Path) -> None:
    done = rlhf(whole_site, "plugins", "check")
    assert done.returncode == 0, done.stdout
    for project in PROJECTS[1:]:
        assert re.search(rf" of rlhf-\w+-{project.name} ", done.stdout)


def test_the_demo_of_the_wheels_runs(site: Path, tmp_path: Path) -> None:
    done = rlhf(site, "run", "dpo", "--train.steps", "3", "--train.stop_at", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model      runs/dpo-1/model" in done.stdout


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_wheel_holds_every_file_of_its_source(project: Path, whole_site: Path) -> None:
    files = [path for path in (project / "src").rglob("*") if path.is_file()]
    for path in (path for path in files if path.suffix != ".pyc"):
        assert (whole_site / path.relative_to(project / "src")).is_file(), path


def test_a_trainer_that_is_not_installed_says_which_package_has_it(site: Path) -> None:
    done = rlhf(site, "run", "kto")
    assert done.returncode == 2
    assert "pip install rlhf-plugin-kto" in done.stderr
    assert done.stderr.count("\n") == 1
