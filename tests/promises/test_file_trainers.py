"""A trainer in a file that is not installed: it trains on two ranks and in worker processes, and
export and resume find the file again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sft_runs
from rlhf.commands.records import export_command
from rlhf.errors import RLHFError
from rlhf.readouts import exported_extra, exported_model
from rlhf_devkit import Ranks, column, tiny, without_timings
from sft_runs import Inputs

FILE = """
from attrs import frozen

from rlhf.readouts import token_logprobs
from rlhf.trainer import Example, Loss, Term, Trainer


@frozen(kw_only=True)
class Settings:
    '''The loss of a token to a power.'''

    power: float = 1.0
    '''Exponent.'''


class Powered(Trainer):
    row_format = "demonstration"
    config: Settings

    def example(self, row):
        return Example(row.prompt, row.answers)

    def setup(self, run):
        self.policy = run.load("policy")

    def loss(self, batch):
        logprobs = self.policy(batch, token_logprobs)["logprobs"]
        return Loss((Term((-logprobs).pow(self.config.power).sum(), per="tokens"),))
"""


def test_a_run_of_a_file_is_resumed_and_exported(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    file = tmp_path / "powered_runs.py"
    file.write_text(FILE)
    trainer, cache = f"{file}:Powered", str(inputs.cache)
    more = ("--train.steps", "4", "--powered_runs.power", "2")

    def run(name: str, *words: str) -> list[dict[str, float]]:
        arguments = sft_runs.words(inputs, tmp_path / name, *more, *words)
        return two.run(tiny.run, trainer, arguments, cache)[0]

    straight = run("straight")
    run("halves", "--train.stop_at", "2")
    halves = run("halves", "--resume")
    assert without_timings(halves)[-1] == without_timings(straight)[-1]
    assert column(straight, "loss")[0] > column(straight, "loss")[-1]
    export_command(str(tmp_path / "straight"), str(tmp_path / "exported"))
    weights = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "straight" / "model" / "model.safetensors").read_bytes()
    file.unlink()
    with pytest.raises(RLHFError) as caught:
        export_command(str(tmp_path / "straight"), str(tmp_path / "again"))
    assert str(caught.value) == (
        f"{file}, the file of a trainer, does not exist; correct the path (for a run folder: "
        "`trainer` in its versions.json)"
    )


OWN = (
    FILE.replace(
        'self.policy = run.load("policy")',
        'self.policy = run.load("policy", extra={"scale": torch.ones(3)})',
    )
    .replace(
        "(-logprobs).pow(self.config.power).sum()",
        "(self.policy(batch, scaled)['scaled']).sum()",
    )
    .replace("from attrs", "import torch\nfrom attrs")
    + """

def scaled(hidden, head, batch):
    return {"scaled": -token_logprobs(hidden, head, batch)["logprobs"] * head.extra["scale"].mean()}
"""
)


def test_an_adapter_of_a_file_is_exported_and_merged_with_its_own_parameters(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    file = tmp_path / "scaled_runs.py"
    file.write_text(OWN)
    run = tmp_path / "run"
    words = sft_runs.words(inputs, run, "--train.steps", "2", "--lora", "2")
    one.run(tiny.run, f"{file}:Powered", words, str(inputs.cache))
    tiny.command("export", str(run), str(tmp_path / "exported"))
    tiny.command("merge", str(run), str(tmp_path / "merged"))
    adapter = "adapter_model.safetensors"
    assert (tmp_path / "exported" / adapter).read_bytes() == (run / "model" / adapter).read_bytes()
    trained = exported_extra(run / "model")["scale"]
    assert not torch.equal(trained, torch.ones(3))
    for folder in (tmp_path / "exported", tmp_path / "merged"):
        assert torch.equal(exported_extra(folder)["scale"], trained)
        card = (folder / "README.md").read_text()
        assert "`extra/parameters.safetensors` has parameters of the trainer's own" in card
        assert "(trainer `" in card
        assert str(tmp_path) not in card
    assert exported_model(tmp_path / "merged", "causal").config.model_type == "llama"


@pytest.mark.matrix
def test_the_command_runs_a_file_on_two_ranks_with_workers(tmp_path: Path) -> None:
    (tmp_path / "powered_file.py").write_text(FILE)
    program = Path(sys.executable).parent / "rlhf"
    env = os.environ | {"RLHF_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    settings = [
        "--model", "demo:base", "--model.dtype", "fp32", "--data", "demo:arithmetic",
        "--data.processes", "2", "--data.workers", "1", "--train.steps", "2",
    ]  # fmt: skip
    for command in ("inspect", "run", "verify"):
        words = [command, "./powered_file.py:Powered", *settings]
        words += ["--nproc", "2"] * (command == "run")
        done = subprocess.run(
            [str(program), *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert "resume exact" in done.stdout
    assert (tmp_path / "runs" / "powered_file-1" / "model" / "model.safetensors").is_file()
