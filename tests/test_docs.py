"""Every command and every YAML in the docs runs; every generated page says what the code says."""

import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from rlhf.commands.main import main
from rlhf.demo import rows
from rlhf.registry.installed import installed
from rlhf.request.reader import read_config
from rlhf.testing.ranks import Ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/**/README.md"))]
PAGES = [page for page in PAGES if not {".venv", "build"} & set(page.parts)]
SLOW = re.compile(r"rlhf run \w+")
"""The demos, which have tests of their own."""
ROWS = {"pairs": "preference", "feedback": "unpaired", "steps": "stepwise"}
"""Files that the docs name, and the format of their rows."""
NEEDS = {"srun": "a cluster", "pip": "a package index", "git": "a network", "make": "a checkout"}
"""First words of commands that a test cannot run."""


def blocks(kind: str) -> list[Any]:
    """The fenced blocks of that kind, with their page."""
    found = []
    for page in PAGES:
        for block in re.findall(
            rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            found.append(pytest.param(block, id=f"{page.relative_to(ROOT)} {block.split()[0]}"))
    return found


def commands() -> list[str]:
    """Every different command of the bash blocks."""
    lines = (line for block in blocks("bash") for line in block.values[0].splitlines())
    lines = (line.replace("step-000400", "step-000004") for line in lines)
    return list(dict.fromkeys(line.split("#")[0].strip() for line in lines if line.strip()))


@pytest.fixture(scope="module")
def place(inputs: tiny.Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names of the docs exist: models, rows, a recipe, a run with
    checkpoints."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "base-model"):
        shutil.copytree(inputs.model, folder / name)
    for name in ("chats.jsonl", "heldout.jsonl"):
        shutil.copy(inputs.train, folder / name)
    for name, kind in ROWS.items():
        tiny.write(folder / f"{name}.jsonl", rows("arithmetic", "train", kind)[:22])
    recipe = {
        "model": {"path": "base-model", "dtype": "fp32"}, "data": "chats.jsonl",
        "batch": 4, "train": {"steps": 4},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    adapter = "from rlhf.hookspecs import hookimpl\nclass E:\n    @hookimpl(wrapper=True)\n"
    adapter += "    def close_mesh(self, mesh):\n        return (yield)\nplugin = E()\n"
    (folder / "small_buckets.py").write_text(adapter)
    info = folder / "small_buckets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: small-buckets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlhf.extensions]\nsmall-buckets = small_buckets:plugin\n"
    )
    return folder


def test_a_command_is_known_by_its_first_word() -> None:
    first = {shlex.split(command)[0] for command in commands()}
    assert first <= {"rlhf", "torchrun", *NEEDS}


def in_place(words: list[str], folder: str, cache: str) -> tuple[int, str]:
    """`rlhf WORDS` in that folder, in a rank of the pool: exit code and complaint."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["RLHF_CACHE"] = cache
    with redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return code, "" if code == 0 else errors.getvalue()


def test_every_command_of_the_docs_works(place: Path, inputs: tiny.Inputs, one: Ranks) -> None:
    for command in commands():
        words = shlex.split(command)
        if SLOW.fullmatch(command) or words[0] in NEEDS:
            continue
        if words[0] == "torchrun" or "--nproc" in words or words[:2] == ["rlhf", "plugins"]:
            run_apart(words, place, inputs)
        else:
            found = one.run(in_place, words[1:], str(place), str(inputs.cache))
            assert found == [(0, "")], command


def run_apart(words: list[str], place: Path, inputs: tiny.Inputs) -> None:
    """The command in a process of its own."""
    program = Path(sys.executable).parent / words[0]
    env = os.environ | {"RLHF_CACHE": str(inputs.cache), "PYTHONPATH": str(place)}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [str(program), *words[1:]], cwd=place, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (words, done.stderr)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_yaml_of_the_docs_is_read(block: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(block)
    assert read_config("sft", source=tmp_path / "config.yaml", inputs=False).config is not None


YAML_FILES = [
    path
    for path in sorted(ROOT.glob("**/*.yaml"))
    if not {".venv", "build", "runs"} & set(path.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_file_of_the_repository_is_read(path: Path) -> None:
    trainers = {row.name for row in installed() if row.kind == "trainer"}
    own = {*yaml.safe_load(path.read_text()), *path.relative_to(ROOT).parts[:2]} & trainers
    trainer = own.pop() if own else "sft"
    rows = ["--data.eval", "rows.jsonl"]  # Which the command line brings where the file does not.
    assert read_config(trainer, source=path, overrides=rows, inputs=False).config is not None


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_of_the_docs_runs(block: str) -> None:
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, page in module.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"run python docs/generate.py: {name}"


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} -> {link}"
