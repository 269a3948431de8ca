"""Jobs over several hosts: what `rlhf launch` prints and starts, and what the environment says."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlhf.request.reader  # noqa: F401  The fixture `toy` hides other packages.
from rlhf.commands.main import main
from rlhf.errors import RLHFError
from rlhf.launch.hosts import ONE_HOST, check_world, place_of_host
from rlhf.launch.jobs import places, read_hosts, slurm_script, train_job, variables

RENDEZVOUS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OTHERS = ("PET_NPROC_PER_NODE", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID")
KUBERNETES = ["kubernetes", "--nodes", "2", "--gpus", "8", "--image", "i"]
TOY = ["toy", "--model", "m", "--data", "d"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RENDEZVOUS, *OTHERS):
        monkeypatch.delenv(name, raising=False)


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
        options=["partition=gpu"], stop_signal="USR1",
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
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --signal=USR1@90",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --partition=gpu",
    ]


def test_slurm_jobs_are_printed_or_submitted(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["slurm", "--nodes", "2", "--gpus", "4"]
    run = [*TOY, "--output", "runs/a b", "--checkpoint.stop_timeout", "120"]
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
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kubernetes", "--nodes", "2", "--gpus", "4", "--image", "me/rlhf", "--volume"]
    run = [*TOY, "--output", "/shared/runs/a", "--resume"]
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
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("# two\nnode1 slots=8\n\nnode2 slots=8\n")
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--port", "1234"]
    assert main(["launch", *words, *TOY, "--output", "runs/a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["# on node1", "# on node2"]
    command = shlex.join([sys.executable, "-m", "rlhf", "run", *TOY, "--output", "runs/a"])
    assert lines[3] == (
        f"cd {Path.cwd()} && PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 "
        f"PET_MASTER_ADDR=node1 PET_MASTER_PORT=1234 {command} --resume"
    )


def test_a_host_starts_only_its_ranks(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text(f"other slots=2\n{socket.gethostname()} slots=2\n")
    started = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        started.append((command, environment))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--start", *TOY, "--output", "a"]
    with pytest.raises(SystemExit):
        main(["launch", *words])
    ((command, environment),) = started
    assert command == [sys.executable, "-m", "rlhf", "run", *TOY, "--output", "a", "--resume"]
    assert [environment[name] for name in RENDEZVOUS] == ["2", "1", "other", "29500"]


def test_a_place_is_read_back_from_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("a slots=3\nb slots=3\n")
    where = places(read_hosts(tmp_path / "hosts"))
    for name, value in variables(where["b"]).items():
        monkeypatch.setenv(name, value)
    place = place_of_host()
    assert place == where["b"]
    assert (place.hosts, place.host, place.address, place.nproc) == (2, 1, "a", 3)


def test_without_variables_there_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of_host() == ONE_HOST
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "gpu")
    assert place_of_host() == ONE_HOST


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            "PET_NNODES is 2, but PET_MASTER_ADDR is not set; set the rank of this host and the "
            "address of the first, or unset PET_NNODES",
        ),
        (
            {"PET_NNODES": "1:4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
            "PET_NNODES is '1:4', which is not a number",
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"},
            "PET_NODE_RANK is 2, but the 2 hosts are counted from 0",
        ),
    ],
)
def test_incomplete_or_invalid_pet_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RLHFError) as error:
        place_of_host()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"PET_NNODES": "4", "WORLD_SIZE": "2"},
            "PET_NNODES is 4, but WORLD_SIZE is 2; start ranks on every host, or unset PET_NNODES",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "WORLD_SIZE": "2"},
            "SLURM_STEP_NUM_TASKS is 8, but WORLD_SIZE is 2; start ranks on every host, or unset "
            "SLURM_STEP_NUM_TASKS",
        ),
        (
            {"SLURM_NTASKS": "8"},
            "SLURM_NTASKS is 8, but this is one process; start the ranks with `srun python -m rlhf "
            "run ...`, or give --nproc to use this machine only",
        ),
        (
            {"RANK": "7", "WORLD_SIZE": "4"},
            "RANK is 7, but WORLD_SIZE is 4; ranks are counted from 0 to WORLD_SIZE - 1",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2; ranks are counted from 0 to "
            "LOCAL_WORLD_SIZE - 1",
        ),
    ],
)
def test_a_number_of_ranks_that_contradicts_the_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RLHFError) as error:
        check_world(None)
    assert str(error.value) == message


def test_complete_worlds_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    check_world(4)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    check_world(None)
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    check_world(None)


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
            ["slurm", "--nodes", "2", "--gpus", "8", *TOY],
            "a job needs --output and no --overwrite: it continues in the same folder when it is "
            "started again",
        ),
        (
            ["slurm", "--nodes", "0", "--gpus", "8", *TOY],
            "argument --nodes: expected a number above 0, got '0'; see `rlhf launch slurm --help`",
        ),
        (
            ["slurm", "--nodes", "2", "--gpus", "8", "--start", *TOY, "--output", "a"],
            "sbatch is not installed here; run the command without --start, save its output, and "
            "submit it on a machine that has sbatch",
        ),
        (
            [*KUBERNETES, "--volume", "data", *TOY, "--output", "a"],
            "--volume expects CLAIM=/path, got 'data'",
        ),
        (
            [*KUBERNETES, "--volume", "data=/s", *TOY, "--output", "runs/a"],
            "output runs/a is not on the volume at /s, which all pods share; set --output /s/a",
        ),
        (
            ["slurm", "--nodes", "2", "--gpus", "8", *TOY, "--output", "a", "--nproc", "4"],
            "--nproc 4 has no effect in a job, whose ranks per host come from --gpus; remove it",
        ),
        (
            ["hostfile", "--hosts", "h", *TOY, "--output", "a", "--nproc", "4"],
            "--nproc 4 has no effect in a job, whose ranks per host come from slots in h; "
            "remove it",
        ),
        (
            ["hostfile", "--hosts", "none", *TOY, "--output", "a"],
            "cannot read the host file none (No such file or directory)",
        ),
    ],
)
def test_impossible_launches_are_refused(
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_host_that_the_file_does_not_list_is_refused(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("elsewhere slots=2\n")
    words = ["hostfile", "--hosts", str(tmp_path / "hosts"), "--start", *TOY, "--output", "a"]
    assert main(["launch", *words]) == 2
    assert capsys.readouterr().err == (
        f"error: this host is {socket.gethostname()}, which {tmp_path / 'hosts'} does not list; "
        "run the printed command of this host\n"
    )


def test_ranks_of_two_hosts_form_one_world(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', "
        "'MASTER_ADDR', 'MASTER_PORT']; rank = os.environ['RANK']; "
        "json.dump([os.environ[n] for n in names], open(sys.argv[1] + rank, 'w'))"
    )
    start = (
        "import sys; from rlhf.launch.local import Ranks; from rlhf.launch.hosts import *; "
        "place = Place(hosts=2, host=1, address='node1', port=7); "
        f"Ranks([sys.executable, '-c', {code!r}, sys.argv[1]], 2, 1.0, place=place).wait()"
    )
    subprocess.run([sys.executable, "-c", start, str(tmp_path / "rank")], check=True)
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (2, 3)] == [
        ["2", "0", "4", "2", "node1", "7"],
        ["3", "1", "4", "2", "node1", "7"],
    ]
