"""Every command and every YAML in the docs runs; every generated page says what the code says."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import Served, serving

from doc_blocks import FENCED, commands, in_place
from guide_package import install_guide
from rlhf.commands.main import main
from rlhf.registry.installed import installed
from rlhf.request.reader import read_config
from rlhf.train.fragments import SavedEngine
from rlhf_demo import rows
from rlhf_devkit import write_rows
from rlhf_devkit.forked import Forked
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/**/README.md"))]
GENERATED = {".venv", "build", "runs"}
PAGES = [
    page for page in PAGES if not {*GENERATED, "templates"} & set(page.relative_to(ROOT).parts)
]
BLOCK_PAGES = [page for page in PAGES if page.name != "tutorial.md"]
"""Those whose blocks are run here; tests/docs/test_tutorial.py runs those of the tutorial."""
SHELL = re.compile(r"(lm_eval|rlhf|torchrun|pip|make|srun|git) ")
DEMO = re.compile(r"rlhf run (?!.*(--model|\.yaml))")
"""The demos, which have tests of their own: here they have two small steps and few held-out
rows."""
APART = {"torchrun", "verify", "--nproc"}
"""Words of commands that start ranks of their own."""
SLOW = APART | {"demo:shapes"}
"""Words of commands that `make test` leaves out: most of a minute each."""
BEARER = "Bearer secret"
"""What docs/serve.md sends as the token."""
ROWS = {
    "pairs": "preference",
    "feedback": "unpaired",
    "steps": "stepwise",
    "prompts": "prompt",
    "rewarded": "rewarded",
}
"""Files that the docs name, and the format of their rows."""
EXTENSIONS = {"small_buckets": "SmallBuckets", "adamax": "AdamaxExtension"}
"""The classes of the extensions in docs/plugins.md."""


def blocks(kind: str) -> list[Any]:
    """The fenced blocks of that kind, with their page."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)} {block.split()[0]}")
        for page in BLOCK_PAGES
        for name, block in FENCED.findall(page.read_text())
        if name == kind
    ]


def shell_blocks() -> list[Any]:
    """The commands of each shell block with its page and line; a command counts once, whichever
    model it trains."""
    found, seen = [], set()
    for page in BLOCK_PAGES:
        text = page.read_text()
        for match in FENCED.finditer(text):
            if match[1] != "bash" and not (match[1] == "" and SHELL.match(match[2])):
                continue
            new = [line for line in commands(match[2]) if same_model(line) not in seen]
            seen.update(map(same_model, new))
            number = text.count("\n", 0, match.start()) + 1
            slow = any(word in line.split() for word in SLOW for line in new)
            marks = [pytest.mark.matrix] if slow else []
            if new:
                name = f"{page.relative_to(ROOT)}:{number}"
                found.append(pytest.param(new, id=name, marks=marks))
    return found


def same_model(command: str) -> str:
    """The command with one model in the place of those that `place` has copied."""
    return command.replace("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


@pytest.fixture(scope="module")
def place(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names of the docs exist: models, rows, a recipe, a run with
    checkpoints."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "base-model"):
        shutil.copytree(inputs.model, folder / name)
    for name in ("chats.jsonl", "heldout.jsonl"):
        shutil.copy(inputs.train, folder / name)
    for name, kind in ROWS.items():
        # Every prompt gets several long answers.
        number = 4 if kind == "prompt" else 22
        write_rows(folder / f"{name}.jsonl", rows("arithmetic", "train", kind)[:number])
    (folder / "rewards.py").write_text(
        "def correct(completions, answer, **columns):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [float(right in text) for text, right in zip(texts, answer)]\n"
    )
    (folder / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    recipe = {
        "model": {"path": "base-model", "dtype": "fp32"},
        "data": "chats.jsonl",
        "batch": 4,
        "train": {"steps": 4},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "dpo.sh").write_text(
        "trl dpo --model_name_or_path base-model --dataset_name a.jsonl\n"
    )
    (folder / "axolotl.yaml").write_text("base_model: base-model\nsequence_len: 512\n")
    install_guide(folder)
    install_extensions(folder)
    return folder


def install_extensions(folder: Path) -> None:
    """Write the extensions of docs/plugins.md into a folder of sys.path as a distribution."""
    page = (ROOT / "docs" / "plugins.md").read_text()
    for name, declared in EXTENSIONS.items():
        (code,) = (code for _, code in FENCED.findall(page) if f"class {declared}:" in code)
        (folder / f"{name}.py").write_text(code)
    info = folder / "page_extensions-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: page-extensions\nVersion: 1.0\n")
    entries = "".join(f"{name} = {name}:plugin\n" for name in EXTENSIONS)
    (info / "entry_points.txt").write_text(f"[rlhf.extensions]\n{entries}")


def test_the_extension_of_the_docs_brings_its_optimizer(
    place: Path, inputs: Inputs, one: Ranks
) -> None:
    words = ["run", "sft", "--extensions", "adamax", "--output", "runs/adamax", "--train.stop_at"]
    assert one.run(in_place, [*words, "2"], str(place), str(inputs.cache)) == [(0, "")]
    saved = SavedEngine(place / "runs/adamax/checkpoints/step-000002/policy")
    assert "exp_inf" in saved.kinds(next(iter(saved.weights())))


@pytest.fixture(scope="module")
def server(place: Path, inputs: Inputs, one: Ranks) -> Iterator[Served]:
    """The server of docs/serve.md."""
    run = ["run", "rm", "--output", "runs/rm-1", "--overwrite", "--train.steps", "1"]
    assert one.run(in_place, run, str(place), str(inputs.cache)) == [(0, "")]
    with serving("runs/rm-1", "--token", "secret", folder=place) as served:
        yield served


@pytest.mark.parametrize("block", shell_blocks())
def test_the_commands_of_the_docs_work(
    block: list[str], place: Path, inputs: Inputs, one: Ranks, request: pytest.FixtureRequest
) -> None:
    for command in block:
        words = shlex.split(command.replace("step-000400", "step-000004"))
        words += short_demo(words[2]) if DEMO.match(command) else []
        words += short_answers(words)
        match words:
            case ["lm_eval", *_] | ["pip", "install", "lm_eval[hf]"]:
                pass  # Needs a network.
            case ["pip", "install", package]:
                assert (ROOT / "plugins" / package.rpartition("-")[2]).is_dir()
            case ["source", script]:
                assert f"VENV := {Path(script).parts[0]}\n" in (ROOT / "Makefile").read_text()
            case ["make", target]:
                assert f"\n{target}: " in (ROOT / "Makefile").read_text()
            case ["srun" | "git", *_] | ["rlhf", "push", *_]:
                pass  # Needs a cluster or a network.
            case ["curl", "-s", url, *_, body] | ["rlhf", "serve", "--check", url, *_, body]:
                server = request.getfixturevalue("server")
                url = url.replace("http://127.0.0.1:8000", server.url)
                if words[0] == "rlhf":
                    rest = [*words[1:3], url, *words[4:]]
                    assert one.run(in_place, rest, str(place), str(inputs.cache)) == [(0, "")]
                else:
                    path = url.removeprefix(server.url)
                    assert server.post(path, body.encode(), authorization=BEARER).status == 200
            case ["rlhf", "serve", *rest]:
                # The server of this command is the one that the next commands ask.
                assert request.getfixturevalue("server").process.args[3:] == [*rest, "--port", "0"]
            case ["rlhf", *rest] if rest[0] != "plugins" and not APART & {*rest}:
                assert one.run(in_place, rest, str(place), str(inputs.cache)) == [(0, "")], command
            case ["rlhf" | "torchrun", *_]:
                run_apart(words, place, inputs)
            case _:
                pytest.fail(f"add a case that tests {command}")


def short_demo(trainer: str) -> list[str]:
    """Words that make a demo short."""
    (file,) = ROOT.glob(f"plugins/{trainer}/src/*/demo.yaml")
    held_out = yaml.safe_load(file.read_text())["data"]["eval"] | {"limit": 8}
    steps = ["--train.steps", "2", "--optim.warmup", "0", "--batch.size", "4"]
    return [*steps, "--data.eval", json.dumps([held_out])]


def short_answers(words: list[str]) -> list[str]:
    """Words that make the answers of a run short, where the command does not say how long."""
    trainer = words[2] if words[:2] == ["rlhf", "run"] else ""
    option = f"--{trainer}.max_new_tokens"
    return [option, "16"] if trainer in ("grpo", "ppo") and option not in words else []


def run_apart(words: list[str], place: Path, inputs: Inputs) -> None:
    """The command in a process of its own."""
    env = os.environ | {"RLHF_CACHE": str(inputs.cache), "PYTHONPATH": str(place)}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if words[0] == "rlhf":
        process = Forked("-m", *words, environment=env, folder=place)
        _, errors = process.communicate()
        assert process.returncode == 0, (words, errors)
        return
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (words, done.stderr)


VALUES = {
    "lora.dropout": "0.1", "lora.parameters": "[experts.down_proj]",
    "model.adapter": "adapter", "model.fp8": "rowwise", "model.quantize": "nf4",
    "model.router_loss": "0.01",
}  # fmt: skip
"""Values of settings that the table of exclusions names without one, unless it is true."""


def test_settings_that_exclude_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    table = (ROOT / "docs" / "backends.md").read_text().split("With any backend, ")[1]
    rows = re.findall(r"^\| (`.+) \| (`.+) \|$", table.split("\n\n")[1], re.MULTILINE)
    pairs = [(name, other) for name, others in rows for other in others.split(", ")]
    assert len(pairs) >= 11

    def words(cell: str) -> list[str]:
        name, *value = cell.strip("`").split()
        return [f"--{name}", *(value or [VALUES.get(name, "true")])]

    for name, other in pairs:
        given = [*words(name), *words(other)]
        if "quantize" in name:
            given += ["--lora.rank", "4"]
        assert main(["config", "sft", *given]) == 2
        assert "cannot be combined with" in capsys.readouterr().err, given


@pytest.mark.parametrize("kind", ["slurm", "hostfile"])
def test_the_jobs_of_the_docs_are_as_printed(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    page = (ROOT / "docs" / "runs.md").read_text()
    command = re.search(rf"^rlhf (launch {kind} .*)$", page, re.MULTILINE)
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    printed = capsys.readouterr().out.replace(str(Path.cwd()), "/shared/work")
    assert f"```text\n{printed.replace(sys.executable, '/shared/venv/bin/python')}```\n" in page


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_yaml_of_the_docs_is_read(block: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(block)
    assert read_config("sft", overrides=[str(file)], inputs=False).config is not None


YAML_FILES = [
    path
    for path in sorted(ROOT.glob("**/*.yaml"))
    if not GENERATED & set(path.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_file_of_the_repository_is_read(path: Path) -> None:
    trainers = {row.name for row in installed() if row.kind == "trainer"}
    own = {*yaml.safe_load(path.read_text()), *path.relative_to(ROOT).parts[:2]} & trainers
    trainer = own.pop() if own else "sft"
    # The command line adds held-out rows if the file has none.
    words = [str(path), "--data.eval", "rows.jsonl"]
    assert read_config(trainer, overrides=words, inputs=False).config is not None


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_of_the_docs_runs(
    block: str, place: Path, inputs: Inputs, one: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for folder, trainer in re.findall(r'"(runs/(rm|prm)-1)/model"', block):
        run = ["run", trainer, "--output", folder, "--overwrite", "--train.steps", "1"]
        assert one.run(in_place, run, str(place), str(inputs.cache)) == [(0, "")]
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, page in module.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"run python docs/generate.py: {name}"


def test_lines_of_the_pages_have_at_most_100_characters() -> None:
    """Except for rows of tables, and for blocks, which may be what a command prints."""
    for page in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")]:
        for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines():
            assert len(line) <= 100 or line.startswith("|"), f"{page.name}: {line}"


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} -> {link}"
