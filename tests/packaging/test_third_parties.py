"""Methods of third parties, in `third_parties/`: each is written over what `rlhf new` makes,
in less than 100 lines, is installed beside the wheels of ours and passes the kit of trainers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from code_lines import code_lines
from rlhf.commands.main import main
from wheel_sites import ROOT, build, make_site, python

METHODS = ROOT / "tests" / "third_parties"
NAMES = sorted(path.name for path in METHODS.iterdir() if (path / "trainer.py").exists())
QUICK = [("calibrated", "packed or least or hyper_parameter"), ("ordinal", "rated or packed")]
"""Methods, and which of their tests `make test` runs."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the core, the backend and the kits beside third-party packages."""
    projects = [ROOT / "core", *(ROOT / "plugins" / name for name in ("deepspeed", "devkit"))]
    wheels = build(tmp_path_factory.mktemp("wheels"), projects)
    return make_site(tmp_path_factory.mktemp("site"), wheels.values())


def write(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the distribution of a method and return its folder."""
    monkeypatch.chdir(folder)
    assert main(["new", "trainer", name]) == 0
    project = folder / f"rlhf-trainer-{name.replace('_', '-')}"
    (source,) = (project / "src").iterdir()
    (source / "demo.yaml").unlink()
    for file in (METHODS / name).glob("*.py"):
        checks = project / "tests" / f"test_{name}.py"
        shutil.copy(file, checks if file.name == "checks.py" else source / file.name)
    if (more := METHODS / name / "entry_points.toml").exists():
        with (project / "pyproject.toml").open("a") as declared:
            declared.write(more.read_text())
    return project


@pytest.mark.parametrize("name", NAMES)
def test_a_method_takes_less_than_a_hundred_lines(name: str) -> None:
    files = (METHODS / name).glob("*.py")
    assert sum(len(code_lines(path.read_text())) for path in files) < 100


@pytest.mark.parametrize(
    ("name", "tests"),
    [*QUICK, *(pytest.param(name, "", marks=pytest.mark.matrix) for name in NAMES)],
)
def test_a_method_passes_its_tests_with_the_wheels_installed(
    name: str, tests: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write(name, tmp_path, monkeypatch)
    (wheel,) = build(tmp_path / "wheel", [project]).values()
    own = tmp_path / "own"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(own), str(wheel)], check=True)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    words += ["--rootdir", str(project), str(project / "tests"), "-k", tests]
    done = python(*words, sites=[site, own], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
