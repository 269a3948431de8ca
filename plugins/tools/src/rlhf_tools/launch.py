"""`rlhf launch`: print or start a job over several hosts."""

import argparse
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf.cli import Request
from rlhf.errors import RLHFError
from rlhf_tools import jobs
from rlhf_tools.engines import engine_server

PROGRAMS = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "create", "-f", "-"]}
"""What reads a job from its standard input."""


def launch_command(request: Request, **chosen: Any) -> int:
    """Print the job or start it; returns the exit code."""
    if request.config.output is None or request.overwrite:
        raise RLHFError(
            "a job needs --output and no --overwrite: it continues in the same folder when it "
            "is started again"
        )
    options = argparse.Namespace(**chosen)
    if request.nproc is not None:
        ranks = f"slots in {options.hosts}" if options.kind == "hostfile" else "--gpus"
        raise RLHFError(
            f"--nproc {request.nproc} has no effect in a job, whose ranks per host come from "
            f"{ranks}; remove it"
        )
    resume = [] if request.resume is not None else ["--resume"]
    arguments = ["-m", "rlhf", *request.argv, *resume]
    if options.kind == "hostfile":
        return _host_file([sys.executable, *arguments], options)
    return _submit(_job(request, arguments, options), options)


def _job(request: Request, arguments: list[str], options: argparse.Namespace) -> str:
    sizes: dict[str, Any] = {"hosts": options.nodes, "nproc": options.gpus, "name": request.name}
    if options.kind == "slurm":
        server = engine_server(request.config) if options.server_node else None
        return jobs.slurm_script(
            [sys.executable, *arguments],
            server=server,
            seconds_to_save=request.config.checkpoint.stop_timeout,
            folder=Path.cwd(),
            options=options.sbatch,
            stop_signal=request.config.checkpoint.stop_signals[0],
            **sizes,
        )
    claim, mount = _volume(options.volume, Path(str(request.config.output)))
    return jobs.train_job(
        ["python", *arguments],
        image=options.image,
        claim=claim,
        mount=mount,
        resource=options.resource,
        **sizes,
    )


def _volume(text: str, output: Path) -> tuple[str, str]:
    """Return the claim and the mount of `--volume`, on which `output` must be."""
    claim, _, mount = text.partition("=")
    if not claim or not mount.startswith("/"):
        raise RLHFError(f"--volume expects CLAIM=/path, got {text!r}")
    if not output.is_relative_to(mount):
        raise RLHFError(
            f"output {output} is not on the volume at {mount}, which all pods share; "
            f"set --output {mount.rstrip('/')}/{output.name}"
        )
    return claim, mount


def _submit(job: str, options: argparse.Namespace) -> int:
    if not options.start:
        print(job, end="")
        return 0
    program = PROGRAMS[options.kind]
    if shutil.which(program[0]) is None:
        raise RLHFError(
            f"{program[0]} is not installed here; run the command without --start, save its "
            f"output, and submit it on a machine that has {program[0]}"
        )
    return subprocess.run(program, input=job, encoding="utf-8", check=False).returncode


def _host_file(command: list[str], options: argparse.Namespace) -> int:
    where = jobs.places(jobs.read_hosts(options.hosts), port=options.port)
    if not options.start:
        print(jobs.host_commands(command, where, folder=Path.cwd()), end="")
        return 0
    names = (socket.gethostname(), socket.gethostname().partition(".")[0])
    if place := next((where[name] for name in names if name in where), None):
        os.execve(command[0], command, os.environ | place)
    raise RLHFError(
        f"this host is {names[0]}, which {options.hosts} does not list; run the printed command "
        "of this host"
    )
