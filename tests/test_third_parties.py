"""Plugins of third parties, in `third_parties/`: each is written over what `rlhf new` makes, in
about 100 lines, is installed beside the wheels of ours and passes the kit of its kind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from code_lines import code_lines
from rlhf.commands.main import main
from wheel_sites import ROOT, build, make_site, python

METHODS = ROOT / "tests" / "third_parties"
MOST = {"trainer": 100, "backend": 120}
"""Lines of code of a plugin of this kind with its tests."""
KINDS = {path.parent.name: kind for kind in MOST for path in METHODS.glob(f"*/{kind}.py")}
"""For each plugin the kind: its file is called so."""
QUICK = {
    "calibrated": "packed or least or hyper_parameter",
    "ordinal": "rated or packed",
    "fully_shard": "(steps_are or resumed_run_is) and 2",
}
"""Plugins, and which of their tests `make test` runs."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of ours beside third-party packages."""
    names = ("deepspeed", "devkit", "dpo", "sft", "torch")
    projects = [ROOT / "core", *(ROOT / "plugins" / name for name in names)]
    wheels = build(tmp_path_factory.mktemp("wheels"), projects)
    return make_site(tmp_path_factory.mktemp("site"), wheels.values())


def write(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the distribution of a plugin and return its folder."""
    monkeypatch.chdir(folder)
    kind = KINDS[name]
    assert main(["new", kind, name]) == 0
    project = folder / f"rlhf-{kind}-{name.replace('_', '-')}"
    (source,) = (project / "src").iterdir()
    (source / "demo.yaml").unlink(missing_ok=True)
    for file in (METHODS / name).glob("*.py"):
        checks = project / "tests" / f"test_{name}.py"
        shutil.copy(file, checks if file.name == "checks.py" else source / file.name)
    if (more := METHODS / name / "entry_points.toml").exists():
        with (project / "pyproject.toml").open("a") as declared:
            declared.write(more.read_text())
    return project


@pytest.mark.parametrize("name", KINDS)
def test_a_plugin_takes_few_lines(name: str) -> None:
    files = (METHODS / name).glob("*.py")
    assert sum(len(code_lines(path.read_text())) for path in files) < MOST[KINDS[name]]


@pytest.mark.parametrize(
    ("name", "tests"),
    [*QUICK.items(), *(pytest.param(name, "", marks=pytest.mark.matrix) for name in KINDS)],
)
def test_a_plugin_passes_its_tests_with_the_wheels_installed(
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
