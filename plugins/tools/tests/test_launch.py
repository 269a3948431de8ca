"""Jobs over several hosts: what `rlhf launch` prints and starts."""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from attrs import frozen

from rlhf.cli import main
from rlhf.errors import RLHFError
from rlhf_tools.jobs import read_hosts, slurm_script, train_job

RENDEZVOUS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
KUBERNETES = ["kubernetes", "--nodes", "2", "--gpus", "8", "--image", "i"]
SFT = ["sft", "--model", "m", "--data", "d"]


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("code", "queued"), [(0, False), (143, True), (138, True), (2, False)])
def test_a_batch_script_queues_itself_again_when_the_run_was_stopped(
    tmp_path: Path, code: int, queued: bool
) -> None:
    program(
        tmp_path / "bin", "srun", f'printf "%s\\n" "$PWD" "$@" > {tmp_path}/started; exit {code}'
    )
    program(tmp_path / "bin", "scontrol", f'echo "$@" > {tmp_path}/queued')
    script = slurm_script(
        ["python", "-m", "rlhf", "run", "dpo", "--data", "two words"],
        name="dpo", hosts=2, nproc=8, seconds_to_save=90.4, folder=tmp_path,
        options=["partition=gpu", "gpus-per-node=10"], stop_signal="USR1",
    )  # fmt: skip
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", "-c", script], env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "started").read_text().splitlines() == [
        str(tmp_path), "--wait=90", "python", "-m", "rlhf", "run", "dpo", "--data", "two words",
    ]  # fmt: skip
    assert (tmp_path / "queued").exists() == queued
    if queued:
        assert (tmp_path / "queued").read_text() == "requeue 17\n"
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=rlhf-dpo",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --signal=USR1@90",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=10",
    ]


@frozen
class Server:
    """A server of a job, whose program is `serve`."""

    folder: str
    seconds: float = 20.0
    command: tuple[str, ...] = ("serve", "two words")
    port: int = 8000
    url_setting: str = "rollouts.vllm.url"
    words: tuple[str, ...] = ("--rollouts.vllm.python", "null")


def with_server(
    folder: Path, *, serve: str, srun: str, seconds: float = 20.0
) -> subprocess.CompletedProcess[str]:
    """Run a job with a server on the host node7, whose health is the file `healthy`."""
    programs = {
        "serve": serve, "srun": srun, "curl": f'echo "$@" > {folder}/asked; cat {folder}/healthy',
        "scontrol": f'echo "$@" > {folder}/queued',
    }  # fmt: skip
    for name, text in programs.items():
        program(folder / "bin", name, text)
    script = slurm_script(
        ["python", "-m", "rlhf"], name="grpo", hosts=2, nproc=8, seconds_to_save=90,
        folder=folder, server=Server(f"{folder}/my run.vllm", seconds),
    )  # fmt: skip
    assert "#SBATCH --nodes=3\n" in script
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "node7",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", script], env=environment, check=False, capture_output=True, encoding="utf-8"
    )


def test_a_batch_script_starts_a_server_on_a_host_of_its_own_and_ends_it(tmp_path: Path) -> None:
    serve = f"""trap 'echo ended >> {tmp_path}/events; exit' TERM
echo "serve $@" >> {tmp_path}/events; echo loading; sleep 0.5; touch {tmp_path}/healthy
while true; do sleep 0.1; done"""
    done = with_server(tmp_path, serve=serve, srun=f'echo "srun $@" >> {tmp_path}/events; exit 143')
    assert done.returncode == 143
    assert wait_until(lambda: (tmp_path / "events").read_text().endswith("ended\n"))
    assert (tmp_path / "events").read_text().splitlines() == [
        "serve two words",
        "srun --wait=90 --nodes=2 --ntasks=16 --exclude=node7 python -m rlhf "
        "--rollouts.vllm.python null --rollouts.vllm.url http://node7:8000",
        "ended",
    ]
    asked = (tmp_path / "asked").read_text()
    assert asked.endswith(" http://node7:8000/health\n")
    assert (tmp_path / "queued").read_text() == "requeue 17\n"
    assert (tmp_path / "my run.vllm" / "server.log").read_text() == "loading\n"


@pytest.mark.parametrize(("serve", "seconds"), [("exit 1", 20.0), ("exec sleep 60", 1.0)])
def test_a_batch_script_waits_for_no_server_that_has_ended_or_is_late(
    serve: str, seconds: float, tmp_path: Path
) -> None:
    done = with_server(tmp_path, serve=serve, srun=f"touch {tmp_path}/run", seconds=seconds)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"the server has ended or does not answer; look at {tmp_path}/my run.vllm/server.log"
    )
    assert not (tmp_path / "run").exists()


def wait_until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    due = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > due:
            return False
        time.sleep(0.05)
    return True


def test_slurm_jobs_are_printed_or_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["slurm", "--nodes", "2", "--gpus", "4"]
    run = [*SFT, "--output", "runs/a b", "--checkpoint.stop_timeout", "120"]
    assert main(["launch", *words, *run]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --signal=TERM@120\n" in printed
    command = shlex.join([sys.executable, "-m", "rlhf", "run", *run, "--resume"])
    assert f"srun --wait=120 {command}\n" in printed

    program(tmp_path / "bin", "sbatch", f"cat > {tmp_path}/job; exit 7")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert main(["launch", *words, "--start", *run]) == 7
    assert (tmp_path / "job").read_text() == printed


def test_a_train_job_mounts_the_volume_that_holds_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["kubernetes", "--nodes", "2", "--gpus", "4", "--image", "me/rlhf", "--volume"]
    run = [*SFT, "--output", "/shared/runs/a", "--resume"]
    assert main(["launch", *words, "data=/shared", *run]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "rlhf", "run", *run]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("me/rlhf", 2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    (override,) = job["spec"]["podTemplateOverrides"]
    (volume,) = override["spec"]["volumes"]
    (container,) = override["spec"]["containers"]
    assert volume["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]


def test_a_train_job_has_a_name_that_kubernetes_accepts() -> None:
    job = train_job(
        [], name="My_Trainer_", hosts=1, nproc=1, image="i", claim="c", mount="/shared"
    )  # fmt: skip
    assert yaml.safe_load(job)["metadata"] == {"name": "rlhf-my-trainer"}


def test_the_commands_of_a_host_file_give_each_host_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("# two\nnode1 slots=8\n\nnode2 slots=8\n")
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--port", "1234"]
    assert main(["launch", *words, *SFT, "--output", "runs/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# on node1", "# on node2"]
    command = shlex.join([sys.executable, "-m", "rlhf", "run", *SFT, "--output", "runs/a"])
    assert lines[3] == (
        f"cd {Path.cwd()} && PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 "
        f"PET_MASTER_ADDR=node1 PET_MASTER_PORT=1234 {command} --resume"
    )


def test_a_host_starts_only_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(f"other slots=2\n{socket.gethostname()} slots=2\n")
    started = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        started.append((command, environment))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--start", *SFT, "--output", "a"]
    with pytest.raises(SystemExit):
        main(["launch", *words])
    ((command, environment),) = started
    assert command == [sys.executable, "-m", "rlhf", "run", *SFT, "--output", "a", "--resume"]
    assert [environment[name] for name in RENDEZVOUS] == ["2", "1", "other", "29500"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=8\nnode2\n", "{path}, line 2: expected NAME slots=N, got 'node2'"),
        ("# none\n", "the host file {path} names no host; write lines such as node1 slots=8"),
        (
            "a slots=8\nb slots=4\n",
            "the hosts in {path} have different numbers of slots; use the smallest for all of them",
        ),
        ("n\xf6de slots=8\n", "the host file {path} is not text in UTF-8"),
        ("a slots=8\na slots=8\n", "a host is listed twice in {path}; give each one line"),
    ],
)
def test_bad_host_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text, encoding="latin-1")
    with pytest.raises(RLHFError) as error:
        read_hosts(tmp_path / "hosts")
    assert str(error.value) == message.format(path=tmp_path / "hosts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["slurm", "--nodes", "2", "--gpus", "8", *SFT],
            "a job needs --output and no --overwrite: it continues in the same folder when it is "
            "started again",
        ),
        (
            ["slurm", "--nodes", "1", "--gpus", "8", "--server-node", *SFT, "--output", "a"],
            "--server-node: a job cannot start a server for rollouts.engine embedded; remove "
            "--server-node, or choose another engine, such as vllm",
        ),
        (
            ["slurm", "--nodes", "0", "--gpus", "8", *SFT],
            "argument --nodes: expected a number above 0, got '0'; see `rlhf launch slurm --help`",
        ),
        (
            ["slurm", "--nodes", "2", "--gpus", "8", "--start", *SFT, "--output", "a"],
            "sbatch is not installed here; run the command without --start, save its output, and "
            "submit it on a machine that has sbatch",
        ),
        (
            [*KUBERNETES, "--volume", "data", *SFT, "--output", "a"],
            "--volume expects CLAIM=/path, got 'data'",
        ),
        (
            [*KUBERNETES, "--volume", "data=/s", *SFT, "--output", "runs/a"],
            "output runs/a is not on the volume at /s, which all pods share; set --output /s/a",
        ),
        (
            ["slurm", "--nodes", "2", "--gpus", "8", *SFT, "--output", "a", "--nproc", "4"],
            "--nproc 4 has no effect in a job, whose ranks per host come from --gpus; remove it",
        ),
        (
            ["hostfile", "--hosts", "h", *SFT, "--output", "a", "--nproc", "4"],
            "--nproc 4 has no effect in a job, whose ranks per host come from slots in h; "
            "remove it",
        ),
        (
            ["hostfile", "--hosts", "none", *SFT, "--output", "a"],
            "cannot read the host file none (No such file or directory)",
        ),
    ],
)
def test_impossible_launches_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_host_that_the_file_does_not_list_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("elsewhere slots=2\n")
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--start", *SFT, "--output", "a"]
    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == (
        f"error: this host is {socket.gethostname()}, which {tmp_path / 'hosts'} does not list; "
        "run the printed command of this host\n"
    )


def test_help_after_a_name_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "--nodes", "2", "--gpus", "8", "sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: rlhf launch sft [CONFIG.yaml] ")
    assert "# Peak learning rate." in text
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "--help"])
    assert "--sbatch" in capsys.readouterr().out
