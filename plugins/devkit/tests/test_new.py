"""`rlhf new`: what it writes installs, passes its own tests at once, and is refused in one line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.commands.main import main
from rlhf.registry.installed import is_satisfied
from rlhf_devkit.new import KINDS, TEMPLATES

NAME = "odd_one"


def write(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a distribution into `folder` and return its own."""
    monkeypatch.chdir(folder)
    assert main(["new", kind, NAME]) == 0
    return folder / f"rlhf-{kind}-odd-one"


def install(project: Path, site: Path) -> None:
    """Build the wheel of a distribution and install it into the folder `site`."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(site), str(project)], check=True)


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a process that also finds what is installed in `site`."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_tests(project: Path, site: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a distribution that is installed in `site`."""
    env = environment(site)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    return subprocess.run(
        [*command, "--rootdir", str(project), str(project / "tests"), *more],
        env=env,
        capture_output=True,
        text=True,
    )


def run_commands(project: Path, site: Path) -> None:
    """Run the commands of a distribution's README, training for two steps."""
    env = environment(site)
    lines = (project / "README.md").read_text().splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("rlhf ")]
    assert commands
    for words in commands:
        more = ["--train.stop_at", "2"] if words[0] == "run" else []
        command = [sys.executable, "-m", "rlhf", *words, *more]
        subprocess.run(command, env=env, cwd=project.parent, check=True)


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "trainer" else pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS],
)
def test_a_new_distribution_passes_its_own_tests(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write(kind, tmp_path, monkeypatch)
    assert not [p for p in project.rglob("*") if "new_name" in p.name or "new-name" in p.name]
    texts = [path.read_text() for path in project.rglob("*") if path.is_file()]
    assert not [text for text in texts if "new_name" in text or "NewName" in text]
    install(project, tmp_path / "site")
    # The kit of trainers takes a minute: the test below runs it.
    quick = ["-k", "not TestOddOne"] if kind == "trainer" else []
    done = run_tests(project, tmp_path / "site", *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    if kind != "trainer":
        run_commands(project, tmp_path / "site")


@pytest.mark.matrix
def test_a_new_trainer_passes_the_kit_and_runs_its_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write("trainer", tmp_path, monkeypatch)
    install(project, tmp_path / "site")
    done = run_tests(project, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    run_commands(project, tmp_path / "site")


KIT = """
from rlhf_devkit import LIKELIHOOD, TrainerConformance


class TestLikelihood(TrainerConformance):
    trainer = LIKELIHOOD
    backend = "odd_one"
    ranks = 1
    precisions = ()
"""


@pytest.mark.matrix
def test_the_kit_of_trainers_runs_on_a_new_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write("backend", tmp_path, monkeypatch)
    install(project, tmp_path / "site")
    (project / "tests" / "test_odd_one.py").write_text(KIT)
    done = run_tests(project, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ranges_of_the_templates_include_this_core() -> None:
    for kind in KINDS:
        text = (TEMPLATES / kind / "pyproject.toml").read_text()
        assert '"rlhf-core>=0.1,<0.2"' in text
    assert is_satisfied("rlhf-core>=0.1,<0.2")


def test_an_invalid_name_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rlhf-trainer-taken").mkdir()
    (tmp_path / "taken.py").touch()
    expected = {
        ("trainer", "my-loss"): "'my-loss' cannot be the name of a trainer; use letters, digits "
        "and underscores, as in my_trainer",
        ("observer", "my_"): "'my_' cannot be the name of an observer; use letters, digits and "
        "underscores, as in my_observer",
        ("trainer", "optim"): "'optim' is reserved for core; choose another name",
        ("backend", "class"): "'class' is a keyword of Python, so it cannot be a section; choose "
        "another name",
        ("trainer", "sft"): "rlhf-plugin-sft has a trainer called 'sft'; choose another name",
        ("trainer", "taken"): "rlhf-trainer-taken already exists; choose another name or remove it",
        ("trainer", "taken", "--here"): "taken.py already exists; choose another name or remove it",
        ("observer", "mine", "--here"): "--here is only for trainers, since rlhf finds an "
        "observer by the metadata of its distribution; remove --here",
    }
    for words, message in expected.items():
        assert main(["new", *words]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


def test_a_file_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").symlink_to("mine.py")
    assert main(["new", "trainer", "mine", "--here"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot write to mine.py (Too many levels of symbolic links); choose another "
        "location\n"
    )
