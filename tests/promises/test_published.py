"""What a finished run leaves for people: its summary, the model card, and what is uploaded."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import sft_runs
from hub_server import TOKEN, Hub, hub
from rlhf.commands.main import main
from rlhf.folder.run_folder import RunFolder
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_devkit import make_model
from rlhf_devkit.plain import PlainBackend
from rlhf_tools.card import name_of
from rlhf_tools.recorded import read_newest, read_run
from sft_runs import Inputs


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an evaluation at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("published") / "run"
    more = ["--train.steps", "4", "--train.eval_every", "2"]
    request = read_config("sft", overrides=sft_runs.words(inputs, folder, *more))
    assert run_rank(request, backend=PlainBackend())[1] == "done"
    return folder


@pytest.fixture
def server() -> Iterator[Hub]:
    """A hub on this machine."""
    with hub() as state:
        yield state


def push(server: Hub, *words: str, **environment: str) -> tuple[int, str]:
    """`rlhf push WORDS` in a process of its own: its exit code and output."""
    # Without Xet the library speaks plain LFS, which the server understands.
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "rlhf", "push", *words]
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_summary_has_the_rows_the_end_and_the_time_of_each_phase(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ended"], summary["error"]) == (4, "done", None)
    assert summary["data"]["train"]["rows"] == 22
    assert summary["data"]["eval"]["examples"] == 7
    phases = {"set-up", "forward", "backward", "update", "evaluation", "checkpoint", "export"}
    assert phases <= summary["seconds"].keys()
    assert all(seconds > 0 for seconds in summary["seconds"].values())
    parts = {"imports", "tokenising", "rehearsal", "planning", "loading", "engine", "first step"}
    assert parts <= summary["startup"].keys()
    assert all(seconds >= 0 for seconds in summary["startup"].values())


def test_a_run_that_fails_says_why(inputs: Inputs, tmp_path: Path) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--optim.lr", "1e30", "--optim.clip", "0")
    with pytest.raises(Exception, match="norm of its gradient is nan"):
        run_rank(read_config("sft", overrides=words), backend=PlainBackend())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ended"] == "failed"
    assert "the norm of its gradient is nan" in summary["error"]


def test_a_run_that_writes_is_running_and_fails_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"steps": 4, "ended": None}))
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 3.0}\n{"step": 7, "lo')
    run = RunFolder(folder, fresh=False)
    assert read_newest(folder).state == "running"
    assert read_run(folder).left_out == []  # Its last line may still be written.
    run.__exit__(ValueError, ValueError("row 3 is odd\nand more"), None)
    assert read_newest(folder).state == "failed"
    assert "row 3 is odd" in read_run(folder).summary["error"]
    assert read_run(folder).left_out == ["1 line of metrics.jsonl"]


def test_the_card_is_read_by_the_hub_and_names_no_folder_of_this_machine(
    run: Path, inputs: Inputs
) -> None:
    text = (run / "model" / "README.md").read_text()
    head = ModelCard(text).data
    assert (head.library_name, head.license, head.base_model) == ("transformers", "unknown", None)
    assert str(inputs.train.parent) not in text
    assert str(run.parent) not in text
    for part in (
        "# model (sft)", "to step 4", "- train: `train.jsonl`; 22 rows, 22 examples, ",
        "AutoModelForCausalLM.from_pretrained(path)", "vllm serve MODEL", "| 4 | ",
        "- path: train.jsonl\n", "torch 2",
    ):  # fmt: skip
        assert part in text, part


def test_the_commands_of_a_card_open_the_model(run: Path) -> None:
    text = (run / "model" / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code.replace('"MODEL"', repr(str(run / "model"))), names)
    assert type(names["model"]).__name__ == "LlamaForCausalLM"


def test_an_exported_checkpoint_has_a_card_of_its_step(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints" / "step-000004"
    assert main(["export", str(newest), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card == (run / "model" / "README.md").read_text()


def test_an_adapter_s_card_says_how_peft_and_vllm_load_it_and_a_merged_one_is_plain(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs.model, "org/base")
    words = sft_runs.words(inputs, tmp_path / "run", "--lora", "2", "--train.steps", "1")
    words += ["--model", "org/base"]
    assert run_rank(read_config("sft", overrides=words), backend=PlainBackend())[1] == "done"
    text = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "AutoPeftModelForCausalLM.from_pretrained(path)" in text
    assert "vllm serve org/base --enable-lora --lora-modules adapter=MODEL" in text
    assert ModelCard(text).data.base_model is None, "a folder here is no name on a hub"
    assert main(["merge", "run", "merged"]) == 0
    merged = (tmp_path / "merged" / "README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained(path)" in merged


@pytest.mark.parametrize(
    ("task", "kind", "served"),
    [
        ("sequence", "A reward model", "SequenceClassification"),
        ("token", "A process reward model", "TokenClassification"),
    ],
)
def test_the_card_of_a_reward_model_names_its_class(
    run: Path, tmp_path: Path, task: str, kind: str, served: str
) -> None:
    from rlhf_tools.card import write_card

    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "model"))
    plan = json.loads((copy / "plan.json").read_text())
    plan["policy"]["task"] = task
    (copy / "plan.json").write_text(json.dumps(plan))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["model"]["path"] = "Qwen/Qwen3-0.6B"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    write_card(tmp_path, copy, role="policy", until=math.inf)
    text = (tmp_path / "README.md").read_text()
    assert f"{kind} trained with rlhf (trainer `sft`) from `Qwen/Qwen3-0.6B`" in text
    assert f"AutoModelFor{served}.from_pretrained(path)" in text
    assert "vllm serve MODEL --runner pooling" in text
    assert ModelCard(text).data.base_model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/home/me/rows.jsonl", "rows.jsonl"), ("~/rows", "rows"), ("../../me/rows", "rows"),
     ("data/rows.jsonl", "data/rows.jsonl"), ("org/rows", "org/rows")],
)  # fmt: skip
def test_a_path_outside_the_working_folder_is_named_by_its_last_part(path: str, name: str) -> None:
    assert name_of(path) == name


def test_push_uploads_weights_tokenizer_config_and_card_and_nothing_else(
    run: Path, server: Hub, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    for name in ("optimizer.pt", ".env", "train.jsonl", "notes.json", "pytorch_model.bin"):
        (copy / "model" / name).write_text("secret")
    (copy / "model" / "other").mkdir()
    (copy / "model" / "other" / "model.safetensors").write_text("secret")
    (copy / "model" / "vocab.json").symlink_to(copy / "config.yaml")
    code, output = push(server, str(copy), "me/model", "--private")
    assert (code, output) == (0, f"uploaded 7 files of {copy / 'model'} to {server.url}/me/model\n")
    names = {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert server.files == {name: (run / "model" / name).read_bytes() for name in names}
    (created,) = server.created
    assert created.get("visibility") == "private" or created.get("private") is True


def test_a_refusal_of_the_hub_is_an_error_in_one_line(
    run: Path, server: Hub, tmp_path: Path
) -> None:
    def message(*words: str, **environment: str) -> str:
        code, output = push(server, *words, **environment)
        assert code == 2
        return output.removeprefix("error: ").removesuffix("\n")

    name = (str(run), "me/model")
    missing = {"HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")}
    assert message(*name, **missing) == (
        f"no token for {server.url}; run `hf auth login` or set HF_TOKEN"
    )
    assert message(*name, HF_TOKEN="wrong") == (
        f"{server.url} refused me/model (401): Invalid token"
    )
    assert message(str(run), "me/a/b").startswith("'me/a/b' is not a name of a repository: ")
    nowhere = "http://127.0.0.1:9"
    assert message(*name, HF_ENDPOINT=nowhere).startswith(f"cannot reach {nowhere} (")
    assert message(str(tmp_path), "me/model") == (
        f"{tmp_path} has no trained model; pass a run with model/, or a model folder"
    )
    server.private = False
    assert message(*name, "--private") == (
        "me/model exists and is public; choose another name or omit --private"
    )
    server.refusal = 403, "no rights in the namespace me"
    assert message(*name) == f"{server.url} refused me/model (403): no rights in the namespace me"
    assert server.files == {}


@pytest.mark.matrix
def test_the_card_of_a_trained_reward_model_opens_it(inputs: Inputs, tmp_path: Path) -> None:
    words = ["--model", str(make_model(tmp_path / "base")), "--model.dtype", "fp32"]
    words += ["--train.steps", "1", "--batch.size", "2", "--output", str(tmp_path / "run")]
    from rlhf_demo import rows
    from rlhf_devkit import write_rows

    pairs = write_rows(tmp_path / "pairs.jsonl", rows("arithmetic", "train", "preference")[:4])
    request = read_config("rm", overrides=[*words, "--data.train", str(pairs)])
    assert run_rank(request, backend=PlainBackend())[1] == "done"
    code = (tmp_path / "run" / "model" / "README.md").read_text().split("```python\n")[1]
    names: dict[str, object] = {}
    exec(code.split("```")[0].replace('"MODEL"', repr(str(tmp_path / "run" / "model"))), names)
    assert type(names["model"]).__name__ == "LlamaForSequenceClassification"
