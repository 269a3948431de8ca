"""What the environment says of the hosts of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.launch.hosts import ONE_HOST, check_world, this_host

RENDEZVOUS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OTHERS = ("PET_NPROC_PER_NODE", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RENDEZVOUS, *OTHERS):
        monkeypatch.delenv(name, raising=False)


def test_the_place_of_a_host_is_read_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(RENDEZVOUS, ("2", "1", "a", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    host = this_host()
    assert (host.hosts, host.number, host.address, host.nproc) == (2, 1, "a", 3)


def test_without_variables_there_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_host() == ONE_HOST
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "gpu")
    assert this_host() == ONE_HOST


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
        this_host()
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


def test_ranks_of_two_hosts_form_one_world(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', "
        "'MASTER_ADDR', 'MASTER_PORT']; rank = os.environ['RANK']; "
        "json.dump([os.environ[n] for n in names], open(sys.argv[1] + rank, 'w'))"
    )
    start = (
        "import sys; from rlhf.launch.local import Ranks; from rlhf.launch.hosts import *; "
        "host = Host(hosts=2, number=1, address='node1', port=7); "
        f"Ranks([sys.executable, '-c', {code!r}, sys.argv[1]], 2, 1.0, host=host).wait()"
    )
    subprocess.run([sys.executable, "-c", start, str(tmp_path / "rank")], check=True)
    assert [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (2, 3)] == [
        ["2", "0", "4", "2", "node1", "7"],
        ["3", "1", "4", "2", "node1", "7"],
    ]
