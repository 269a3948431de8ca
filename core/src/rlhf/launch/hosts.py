"""This machine among the hosts of a run, and the ranks that SLURM's `srun` has started.

The variables of hosts are those that torchrun reads instead of its flags and that Kubeflow sets:
PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT and PET_NPROC_PER_NODE.
"""

import os
import shutil
import subprocess

from attrs import frozen

from rlhf.errors import RLHFError

PORT = 29500
"""torchrun's default for the port of the rendezvous."""


@frozen
class Host:
    """One of the hosts of a run, each with the same number of ranks."""

    hosts: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    """Of the first host."""
    port: int | None = None
    """None: any free one."""
    nproc: int | None = None
    """Ranks of each host; None: one per device."""


ONE_HOST = Host()


def this_host() -> Host:
    """Return the host that the environment describes. Raises RLHFError if part of it is
    missing."""
    env = os.environ
    text = env.get("PET_NPROC_PER_NODE", "")
    nproc = int(text) if text.isdecimal() else None  # torchrun also accepts auto, gpu and cpu.
    if env.get("PET_NNODES", "1") == "1":
        return Host(nproc=nproc)
    if missing := [name for name in ("PET_NODE_RANK", "PET_MASTER_ADDR") if name not in env]:
        raise RLHFError(
            f"PET_NNODES is {env['PET_NNODES']}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; set the rank of this host and the "
            "address of the first, or unset PET_NNODES"
        )
    values = [env["PET_NNODES"], env.get("PET_MASTER_PORT", str(PORT)), env["PET_NODE_RANK"]]
    for name, value in zip(("PET_NNODES", "PET_MASTER_PORT", "PET_NODE_RANK"), values, strict=True):
        if not value.isdecimal():
            raise RLHFError(f"{name} is {value!r}, which is not a number")
    hosts, port, host = map(int, values)
    if host >= hosts:
        raise RLHFError(f"PET_NODE_RANK is {host}, but the {hosts} hosts are counted from 0")
    return Host(hosts, host, env["PET_MASTER_ADDR"], port, nproc)


def _check_ranks() -> None:
    """Raise RLHFError unless the launcher's numbers of this rank are below those of all ranks."""
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, ranks = os.environ.get(name, ""), os.environ.get(of, "")
        if rank.isdecimal() and ranks.isdecimal() and int(rank) >= int(ranks):
            raise RLHFError(
                f"{name} is {rank}, but {of} is {ranks}; ranks are counted from 0 to {of} - 1"
            )


def check_world(nproc: int | None) -> None:
    """Raise RLHFError if the environment promises more ranks than were started.

    Such a run would train by itself in each process, each with all of the data.
    """
    env = os.environ
    world = env.get("WORLD_SIZE")
    _check_ranks()
    for name in ("PET_NNODES", "SLURM_STEP_NUM_TASKS"):
        promised = env.get(name, "1")
        if world and promised.isdecimal() and world.isdecimal() and int(world) < int(promised):
            raise RLHFError(
                f"{name} is {promised}, but WORLD_SIZE is {world}; start ranks on every host, or "
                f"unset {name}"
            )
    tasks = env.get("SLURM_NTASKS", "1")
    if world is None and nproc is None and "SLURM_STEP_ID" not in env and tasks != "1":
        raise RLHFError(
            f"SLURM_NTASKS is {tasks}, but this is one process; start the ranks with "
            "`srun python -m rlhf run ...`, or give --nproc to use this machine only"
        )


def join_slurm() -> None:
    """Set the variables of torch's rendezvous from those of `srun`, if it started several tasks."""
    env = os.environ
    # A batch script itself has the SLURM_NTASKS of its allocation, but no step.
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in env or tasks == "1" or "SLURM_PROCID" not in env:
        return
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _first_host()
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], tasks
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")


def _first_host() -> str:
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    command = ["scontrol", "show", "hostnames", hosts]
    listed = shutil.which("scontrol") and subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False
    )
    if not listed or listed.returncode or not listed.stdout:
        raise RLHFError(f"cannot find the first host of {hosts!r} with scontrol; set MASTER_ADDR")
    return listed.stdout.split()[0]
