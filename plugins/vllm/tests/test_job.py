"""The server that a job of `rlhf launch slurm --server-node` starts, and the run that it serves."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_venv import make_environment

import rlhf_demo
from rlhf.cli import main, read_config
from rlhf_devkit import tiny
from rlhf_rollout_vllm.arguments import INSIDE, PROGRAM

TESTS = Path(__file__).parent
LAUNCH = ["launch", "slurm", "--nodes", "2", "--gpus", "8", "--server-node", "grpo"]
RUN = ["--model", "m", "--data", "d", "--grpo.rewards", "exact", "--rollouts", "vllm"]


def launched(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the script of a job."""
    assert main([*LAUNCH, *words]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n", "-c", script], check=True)
    return script


def line(script: str, start: str) -> list[str]:
    """Return the words of the line that begins so."""
    return shlex.split(next(it for it in script.splitlines() if it.startswith(start)))


def test_a_job_starts_the_server_of_the_run_and_attaches_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_environment(tmp_path / "env", version=None, packages=())
    (tmp_path / "recipe.yaml").write_text(
        f"rollouts:\n  vllm:\n    python: {python}\n    environment: {{CUDA_X: '1'}}\n"
        "    arguments: [--tensor-parallel-size, '8']\n    restarts: 1\n    port: 8123\n"
        "data: {max_tokens: 512}\n"
    )
    words = [*RUN, "--output", f"{tmp_path}/runs/a"]
    script = launched(capsys, str(tmp_path / "recipe.yaml"), *words)
    command = line(script, "env ")
    assert command[: command.index(">>")] == [
        "env", "VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "VLLM_NO_USAGE_STATS=1", "CUDA_X=1", f"PYTHONPATH={INSIDE}", python, str(PROGRAM), "0", "m",
        "--served-model-name", "policy", "--dtype", "bfloat16", "--max-model-len", "512",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-scale-out", "--load-format", "dummy", "--weight-transfer-config",
        '{"backend": "rlhf_files"}', "--host", "0.0.0.0", "--port", "8123",
        "--tensor-parallel-size", "8",
    ]  # fmt: skip
    assert 'url="http://$SLURMD_NODENAME:8123"\n' in script
    run = line(script, "srun ")
    assert run[-2:] == ["--rollouts.vllm.url", "$url"]
    (tmp_path / "runs" / "a.vllm").mkdir(parents=True)
    ours = [*run[run.index("grpo") + 1 : -1], "http://node7:8123"]
    config = read_config("grpo", overrides=ours).config
    assert config.rollouts.vllm.url == "http://node7:8123"  # type: ignore[attr-defined]
    assert config.rollouts.vllm.python is None  # type: ignore[attr-defined]
    assert config.rollouts.vllm.folder == f"{tmp_path}/runs/a.vllm"  # type: ignore[attr-defined]


def test_a_job_does_not_serve_images_of_which_the_run_trains_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_environment(tmp_path / "env", version=None, packages=())
    words = [*RUN, "--output", "runs/a", "--rollouts.vllm.python", python]
    assert main([*LAUNCH, *words, "--model.part", "text"]) == 2
    assert capsys.readouterr().err == (
        "error: --server-node: with model.part text the server would serve the images of m too; "
        "set rollouts.vllm.model to an export with model.part text, or remove --server-node\n"
    )
    launched(capsys, *words, "--model.part", "text", "--rollouts.vllm.model", "text")


def test_the_server_of_a_job_takes_adapters_of_the_runs_rank_and_the_users_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make_environment(tmp_path / "env", version=None, packages=())
    words = [*RUN, "--output", "runs/a", "--rollouts.vllm.python", python]
    words += ["--rollouts.vllm.folder", str(tmp_path)]
    script = launched(capsys, *words, "--lora", "20")
    command = line(script, "env ")
    assert command[command.index("--enable-lora") :][:5] == [
        "--enable-lora", "--max-loras", "1", "--max-lora-rank", "32",
    ]  # fmt: skip
    assert "--rollouts.vllm.folder runs/a.vllm" not in script
    (tmp_path / "adapter_config.json").write_text('{"r": 64}')
    script = launched(capsys, *words, "--model.adapter", str(tmp_path))
    assert "--max-lora-rank 64 " in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rollouts.vllm.url", "http://127.0.0.1:1"],
            "rollouts.vllm.url http://127.0.0.1:1 is a server that runs already; set "
            "rollouts.vllm.python instead, or remove --server-node",
        ),
        (
            ["--rollouts.vllm.python", sys.executable, "--model.adapter", "none"],
            "cannot read the rank of model.adapter in none/adapter_config.json ([Errno 2] No such "
            "file or directory: 'none/adapter_config.json'); set model.adapter to a folder with a "
            "LoRA adapter",
        ),
    ],
)
def test_a_server_that_a_job_cannot_start_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LAUNCH, *RUN, "--output", "a", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.matrix
def test_a_job_trains_on_the_answers_of_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = os.pathsep.join([str(TESTS / "fake_environment"), str(TESTS), *filter(None, sys.path)])
    environment = {"PYTHONPATH": path, "SEEN": str(tmp_path / "seen")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows = rlhf_demo.rows("arithmetic", "train", "prompt")[:4]
    script = launched(
        capsys,
        "--model", str(tiny.make_model(tmp_path / "model", ends_answers=True)),
        "--model.dtype", "fp32", "--data.workers", "0", "--grpo.rewards", "exact",
        "--data.train", str(tiny.write_rows(tmp_path / "train.jsonl", rows)),
        "--batch.size", "2", "--batch.tokens", "2048", "--data.max_tokens", "64",
        "--train.steps", "2", "--grpo.max_new_tokens", "6", "--grpo.answers", "2",
        "--output", str(tmp_path / "run"), "--rollouts", "vllm", "--rollouts.vllm.port", str(port),
        "--rollouts.vllm.python", make_environment(tmp_path / "env", version=None, packages=()),
        "--rollouts.vllm.environment", json.dumps(environment),
    )  # fmt: skip
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    variables = {
        "PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "127.0.0.1", "RLHF_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | variables, check=False, capture_output=True,
        encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"\nrollouts   vLLM at http://127.0.0.1:{port}\n" in done.stdout
    assert (tmp_path / "run" / "model").is_dir()
    assert (tmp_path / "run.vllm" / "server.log").read_text() == "loading\n"
    assert {it.name for it in (tmp_path / "run.vllm").iterdir()} == {"server.log"}
