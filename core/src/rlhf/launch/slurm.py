"""Join the ranks that SLURM's `srun` has started."""

import os
import shutil
import subprocess

from rlhf.errors import RLHFError


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
