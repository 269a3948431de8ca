"""What a user installs: the wheels of all distributions, and those of one trainer only."""

import tomllib
from pathlib import Path

import pytest

from wheel_sites import PROJECTS, build, make_site, python, required, rlhf, top_level

INSTALLED = ("core", "deepspeed", "demo", "dpo", "kernels", "optim", "rows", "tools")
"""What a user of one trainer installs."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of every distribution, by the name of its folder."""
    return build(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of one trainer and of what it brings, nothing else of ours."""
    return make_site(tmp_path_factory.mktemp("one"), [wheels[name] for name in INSTALLED])


@pytest.fixture(scope="module")
def whole_site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels."""
    return make_site(tmp_path_factory.mktemp("all"), wheels.values())


def test_the_plugins_of_the_wheels_are_found_and_no_others(site: Path) -> None:
    done = rlhf(site, "plugins")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    tools = ["cache", "card", "doctor", "inspect", "launch", "plan", "plugins", "push"]
    tools += ["report", "runs"]
    demos = ["arithmetic", "base", "equations", "ranked", "sums"]
    formats = ["demonstration", "preference", "prompt", "unpaired"]
    assert sorted(names) == sorted(["deepspeed", "dpo", "triton", *tools, *demos, *formats])


def test_every_plugin_of_all_wheels_loads(whole_site: Path) -> None:
    done = rlhf(whole_site, "plugins", "check")
    assert done.returncode == 0, done.stdout
    for project in filter(has_plugins, PROJECTS):
        assert f" of {name_of(project)} " in done.stdout


def test_the_demo_of_the_wheels_runs(site: Path, tmp_path: Path) -> None:
    words = ["--train.steps", "3", "--train.stop_at", "2", "--batch.size", "4"]
    words += ["--train.eval_at_start", "false"]
    done = rlhf(site, "run", "dpo", *words, folder=tmp_path)
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


def test_a_demo_that_is_not_installed_says_which_package_has_it(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    site = make_site(tmp_path, [wheels[name] for name in INSTALLED if name != "demo"])
    done = rlhf(site, "run", "dpo", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, "error: demo 'base' is not installed (run `pip install rlhf-demo`); available: none\n"
    )  # fmt: skip
    assert not list(tmp_path.glob("runs/*"))


def test_samples_without_an_engine_that_writes_them_name_the_package(
    site: Path, tmp_path: Path
) -> None:
    done = rlhf(site, "run", "dpo", "--train.samples", "2", "--nproc", "1", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, "error: train.samples: rollouts 'embedded' is not installed (run `pip install "
        "rlhf-rollouts`); available: none\n",
    )  # fmt: skip
    assert not list(tmp_path.glob("runs/*/*"))


LOAD = """
from rlhf.registry.imports import load_object, load_record
from rlhf.registry.gateway import load_backend
from rlhf.registry.installed import installed
for plugin in installed():
    records = {"trainer": "trainer", "observer": "hooks", "command": "run", "format": "read"}
    records |= {"demo": "rows", "export": "write", "kernels": "kernels", "media": "reader"}
    records |= {"rollouts": "engine"}
    of = records.get(plugin.kind)
    record = load_backend(plugin) if of is None else getattr(load_record(plugin), of)
    object = load_object(record) if isinstance(record, str) else record
    print(plugin.distribution, object)
import rlhf.train.rank, rlhf.commands.merge
"""
ALONE = [
    project if project.name == "rm" else pytest.param(project, marks=pytest.mark.matrix)
    for project in PROJECTS
]


@pytest.mark.parametrize("project", ALONE, ids=lambda path: path.name)
def test_a_distribution_loads_with_only_what_it_declares(
    project: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    needed = {name_of(project), *required(dependencies(project))}
    ours = [path for path in PROJECTS if name_of(path) in needed]
    site = make_site(
        tmp_path, [wheels[path.name] for path in ours], third_party={*top_level(needed)}
    )
    # Without what the base interpreter has installed.
    loaded = python("-S", "-c", LOAD, sites=[site])
    assert loaded.returncode == 0, loaded.stderr
    distributions = {line.split()[0] for line in loaded.stdout.splitlines()}
    assert len(distributions) == sum(map(has_plugins, ours))


def has_plugins(project: Path) -> bool:
    """Return whether a distribution has plugins. Others are libraries, as core is."""
    return "entry-points" in tomllib.loads((project / "pyproject.toml").read_text())["project"]


def dependencies(project: Path) -> list[str]:
    """Return the requirements of a project."""
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]


def name_of(project: Path) -> str:
    """Return the name of a project's distribution."""
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
