"""Plugins of third parties, in `third_parties/`: each is written over what `rlhf new` makes, in
about 100 lines, is installed beside the wheels of ours and passes the kit of its kind. Commands, an
observer and a generation engine of third parties are installed there too."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from code_lines import code_lines
from rlhf.commands.main import main
from rlhf.folder.checkpoints import all_checkpoints, damage
from wheel_sites import ROOT, build, make_site, python, rlhf

METHODS = ROOT / "tests" / "third_parties"
MOST = {"trainer": 100, "backend": 120}
"""Lines of code of a plugin of this kind with its tests."""
KINDS = {path.parent.name: kind for kind in MOST for path in METHODS.glob(f"*/{kind}.py")}
"""For each plugin the kind: its file is called so."""
QUICK = {
    ("calibrated", "ordinal", "group_clip"): (
        "packed or least_at or rated_rows or (calibrated and hyper) or replay or advantage"
    ),
}
"""Plugins that one process tests, and which of their tests `make test` runs."""
OF_ONE_KIND = [tuple(name for name in KINDS if KINDS[name] == kind) for kind in MOST]
"""All plugins: a trainer's kit takes the only backend that is installed."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels of ours, by the name of the folder."""
    names = (
        *("deepspeed", "demo", "devkit", "dpo", "optim", "rollouts", "rows", "sft", "tools"),
        "torch",
    )
    projects = [ROOT / "core", *(ROOT / "plugins" / name for name in names)]
    return build(tmp_path_factory.mktemp("wheels"), projects)


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of ours beside third-party packages."""
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
    ("names", "tests"),
    [*QUICK.items(), *(pytest.param(each, "", marks=pytest.mark.matrix) for each in OF_ONE_KIND)],
    ids=str,
)
def test_a_plugin_passes_its_tests_with_the_wheels_installed(
    names: tuple[str, ...],
    tests: str,
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projects = [write(name, tmp_path, monkeypatch) for name in names]
    sites = [site, *(install(project, tmp_path / project.name) for project in projects)]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir"]
    words += [str(tmp_path), *(str(project / "tests") for project in projects), "-k", tests]
    done = python(*words, sites=sites, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def install(project: Path, folder: Path) -> Path:
    """Install a distribution into a folder of its own and return it."""
    (wheel,) = build(folder / "wheel", [project]).values()
    own = folder / "own"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(own), str(wheel)], check=True)
    return own


def test_a_command_takes_what_run_takes_and_an_engine_writes_what_evaluations_show(
    site: Path, wheels: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, engine = (install(METHODS / name, tmp_path / name) for name in ("sweep", "scripted"))
    few = make_site(tmp_path / "few", [wheels["core"], wheels["tools"]])

    def sweep(*words: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "rlhf", *words, sites=[site, own, engine], folder=tmp_path)

    assert "\nrlhf-sweep: Trains once per learning rate\n  sweep\n" in sweep("--help").stdout
    # With few plugins: the check loads all of them.
    checked = python("-m", "rlhf", "plugins", "check", sites=[few, own], folder=tmp_path)
    assert "ok          command 'sweep' of rlhf-sweep 1.0\n" in checked.stdout
    (tmp_path / "answers.json").write_text('["The answer is 7.", "8"]')
    monkeypatch.setenv("SCRIPTED_ANSWERS", "answers.json")
    words = ["--rate", "1e-3", "--train.steps", "1", "--train.eval_at_start", "false"]
    words += ["--train.samples", "2", "--rollouts", "scripted", "--rate=0.002"]
    done = sweep("sweep", "sft", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("lr ")]
    assert [line.split("  ")[0] for line in lines] == ["lr 0.001", "lr 0.002"]
    run = tmp_path / "sweep" / "lr-0.002"
    assert (run / "model").is_dir()
    lines = (run / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["answers"] for line in lines] == [["The answer is 7."], ["8"]]
    missing = sweep("sweep", "sft")
    assert (missing.returncode, missing.stderr) == (
        2, "error: the following arguments are required: --rate; see `rlhf sweep --help`\n"
    )  # fmt: skip
    done = rlhf(site, "sweep", folder=tmp_path)
    assert done.stderr.startswith("error: command 'sweep' is not installed; available: run, ")
    done = rlhf(site, "serve", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: command 'serve' is not installed (run `pip install rlhf-serve`); available: run, "
    )


@pytest.mark.parametrize("name", ["__init__", "trainer"])
def test_the_on_policy_trainer_is_that_of_the_page(name: str) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    module = (METHODS / "group_clip" / f"{name}.py").read_text()
    assert f"```python\n{module}```" in page


TWO_RUNS = """
from rlhf.commands.main import main

words = ["sft", "--observers.bucket.url", "{url}", "--train.eval_at_start", "false"]
words += ["--checkpoint.every", "2", "--train.steps", "4", "--train.log_every", "1"]
assert main(["run", *words, "--output", "first", "--train.stop_at", "3"]) == 0
assert main(["bucket", *words, "--output", "second/run"]) == 0
assert main(["bucket", *words, "--output", "{url}"]) == 2
"""


def test_the_module_for_a_bucket_is_that_of_the_page_and_short() -> None:
    page = (ROOT / "docs" / "observers.md").read_text()
    module = (METHODS / "bucket" / "rlhf_bucket.py").read_text()
    assert f"```python\n{module}```" in page
    assert f"```toml\n{(METHODS / 'bucket' / 'pyproject.toml').read_text()}```" in page
    assert len(code_lines(module)) <= 70


def test_checkpoints_in_a_bucket_are_complete_and_resume_a_run_in_a_new_folder(
    site: Path, tmp_path: Path
) -> None:
    own, bucket = install(METHODS / "bucket", tmp_path / "bucket"), tmp_path / "in the bucket"
    program = TWO_RUNS.replace("{url}", f"file://{bucket}")
    done = python("-c", program, sites=[site, own], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed    step-000003, 1 step to go\n" in done.stdout
    assert done.stderr.endswith(
        "error: rlhf bucket needs observers.bucket.url and a local --output, no --overwrite\n"
    )
    names = [f"step-{step:06d}" for step in (2, 3, 4)]
    assert [path.name for path in all_checkpoints(bucket / "checkpoints")] == names
    assert [damage(path) for path in all_checkpoints(bucket / "checkpoints")] == [None] * 3
    # Only the newest one was fetched.
    run = tmp_path / "second" / "run"
    assert [path.name for path in all_checkpoints(run / "checkpoints")] == names[1:]
    assert (bucket / "model" / "model.safetensors").is_file()
    for name in ("metrics.jsonl", "summary.json"):
        assert (bucket / name).read_bytes() == (run / name).read_bytes()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, lines) if "loss" in line] == [1, 2, 3, 4]
