"""What a user installs: wheels of the core, the backend and one trainer, nothing else of ours."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = ("core", "plugins/deepspeed", "plugins/dpo")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages with the third-party packages and our three wheels."""
    # By this name dill knows what is installed and need not be sent to other processes.
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("a") / "site-packages"
    site.mkdir()
    for project in INSTALLED:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(wheels)]
        subprocess.run([*command, str(ROOT / project)], check=True, capture_output=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("rlhf", "__editable__", "_rlhf", "_editable")):
            (site / entry.name).symlink_to(entry)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(site), *map(str, wheels.iterdir())], check=True)
    return site


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
    assert sorted(names) == ["deepspeed", "dpo", "tensorboard"]


def test_every_plugin_of_the_wheels_loads(site: Path) -> None:
    done = rlhf(site, "plugins", "check")
    assert done.returncode == 0, done.stdout


def test_the_demo_of_the_wheels_runs(site: Path, tmp_path: Path) -> None:
    done = rlhf(site, "run", "dpo", "--train.steps", "3", "--train.stop_at", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model      runs/dpo-1/model" in done.stdout


def test_every_file_that_is_no_code_is_in_the_wheel(site: Path) -> None:
    for source in (ROOT / "core/src/rlhf", ROOT / "plugins/dpo/src/rlhf_plugin_dpo"):
        files = [path for path in source.rglob("*") if path.is_file()]
        for path in (path for path in files if path.suffix not in (".py", ".pyc")):
            assert (site / path.relative_to(source.parent)).is_file(), path


def test_a_trainer_that_is_not_installed_says_which_package_has_it(site: Path) -> None:
    done = rlhf(site, "run", "kto")
    assert done.returncode == 2
    assert "pip install rlhf-plugin-kto" in done.stderr
    assert done.stderr.count("\n") == 1
