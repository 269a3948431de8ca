"""The text of a job over several hosts, for SLURM, for Kubernetes, or for a host file."""

import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlhf.errors import RLHFError


class ServerJob(Protocol):
    """A server that a job starts on a host of its own, as the settings of an engine name it."""

    @property
    def command(self) -> Sequence[str]:
        """Starts the server, which other hosts reach."""

    @property
    def port(self) -> int: ...

    @property
    def folder(self) -> str:
        """The folder of its log."""

    @property
    def seconds(self) -> float:
        """Time in which it has to answer at the path /health."""

    @property
    def url_setting(self) -> str:
        """The setting of the run that gets its address."""

    @property
    def words(self) -> Sequence[str]:
        """Further words of the run."""


def slurm_script(
    command: Sequence[str],
    *,
    name: str,
    hosts: int,
    nproc: int,
    seconds_to_save: float,
    folder: Path,
    options: Sequence[str] = (),
    stop_signal: str = "TERM",
    server: ServerJob | None = None,
) -> str:
    """Return a batch script that runs `command` once per device and continues it when time is up.

    The ranks get the signal `seconds_to_save` before the end, save, and exit with 143; the script
    then puts the job back into the queue, also if the signal ended ranks before Python had started.
    `options` are further options of sbatch, such as `partition=gpu`. A `server` has one more host,
    that of the script, whose processes do not get the signal.
    """
    seconds = round(seconds_to_save)
    codes = dict.fromkeys([143, 128 + signal.Signals[f"SIG{stop_signal}"]])
    stopped = " || ".join(f'[ "$code" = {code} ]' for code in codes)
    directives = [
        f"job-name=rlhf-{name}", f"nodes={hosts + (server is not None)}",
        f"ntasks-per-node={nproc}", f"gpus-per-node={nproc}", f"signal={stop_signal}@{seconds}",
        "requeue", "open-mode=append",
    ]  # fmt: skip
    step, start, words = f"--wait={seconds}", "", shlex.join(command)
    if server is not None:
        step += f' --nodes={hosts} --ntasks={hosts * nproc} --exclude="$SLURMD_NODENAME"'
        start = _start_server(server)
        words += f' {shlex.join(server.words)} --{server.url_setting} "$url"'
    # Without --wait, the ranks of other hosts would wait for one that has failed.
    return f"""\
#!/bin/bash
{_sbatch(directives, options)}
cd {shlex.quote(str(folder))} || exit 1
{start}srun {step} {words}
code=$?
# 143: the run was stopped and has saved. The same job continues it.
if {stopped}; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def _sbatch(directives: Sequence[str], options: Sequence[str]) -> str:
    """Return the lines for sbatch, where `options` replace directives of the same name."""
    chosen = {option.partition("=")[0] for option in options}
    kept = [each for each in directives if each.partition("=")[0] not in chosen]
    return "".join(f"#SBATCH --{each}\n" for each in (*kept, *options))


def _start_server(server: ServerJob) -> str:
    """Return the lines that start a server on the host of the script and wait until it answers."""
    log = f"{server.folder}/server.log"
    problem = f"the server has ended or does not answer; look at {log}"
    return f"""\
# The server writes the answers on this host; the ranks run on the others.
url="http://$SLURMD_NODENAME:{server.port}"
mkdir -p {shlex.quote(server.folder)}
{shlex.join(server.command)} >> {shlex.quote(log)} 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null' EXIT
due=$((SECONDS + {round(server.seconds)}))
until curl --silent --fail --noproxy "*" --output /dev/null "$url/health"; do
    if ! kill -0 "$server" 2> /dev/null || [ "$SECONDS" -ge "$due" ]; then
        echo {shlex.quote(problem)} >&2
        exit 2
    fi
    sleep 1
done
"""


def train_job(
    command: Sequence[str],
    *,
    name: str,
    hosts: int,
    nproc: int,
    image: str,
    claim: str,
    mount: str,
    resource: str = "nvidia.com/gpu",
) -> str:
    """Return the manifest of a Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1).

    Its runtime torch-distributed gives each pod the variables that rlhf reads. The
    volume claim `claim`, mounted at `mount`, is the shared file system.
    """
    volume = {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
    container = {"name": "node", "volumeMounts": [{"name": "shared", "mountPath": mount}]}
    manifest: dict[str, Any] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": f"rlhf-{name}".replace("_", "-").lower().rstrip("-")},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": image,
                "command": list(command),
                "numNodes": hosts,
                "numProcPerNode": nproc,
                "resourcesPerNode": {"limits": {resource: nproc}},
            },
            "podTemplateOverrides": [
                {
                    "targetJobs": [{"name": "node"}],
                    "spec": {"volumes": [volume], "containers": [container]},
                }
            ],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False)


def read_hosts(path: Path) -> list[tuple[str, int]]:
    """Return name and number of ranks of each host: lines `NAME slots=N`, as the deepspeed launcher
    reads them. Raises RLHFError for a bad line, or if hosts have different numbers of slots."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RLHFError(f"cannot read the host file {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RLHFError(f"the host file {path} is not text in UTF-8") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if match := re.fullmatch(r"(\S+)\s+slots=0*([1-9][0-9]*)", text):
            hosts.append((match[1], int(match[2])))
        elif text:
            raise RLHFError(f"{path}, line {number}: expected NAME slots=N, got {text!r}")
    if not hosts:
        raise RLHFError(f"the host file {path} names no host; write lines such as node1 slots=8")
    if len({slots for _, slots in hosts}) > 1:
        raise RLHFError(
            f"the hosts in {path} have different numbers of slots; use the smallest for all of them"
        )
    if len({name for name, _ in hosts}) < len(hosts):
        raise RLHFError(f"a host is listed twice in {path}; give each one line")
    return hosts


def places(hosts: Sequence[tuple[str, int]], *, port: int) -> dict[str, dict[str, str]]:
    """Return the environment from which rlhf reads the place of each host; the first one has
    rank 0."""
    first = hosts[0][0]
    return {
        name: {
            "PET_NNODES": str(len(hosts)),
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": str(slots),
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": str(port),
        }
        for index, (name, slots) in enumerate(hosts)
    }


def host_commands(command: Sequence[str], where: dict[str, dict[str, str]], *, folder: Path) -> str:
    """Return a shell line for each host, which runs `command` in `folder`."""
    lines = []
    for name, variables in where.items():
        values = " ".join(f"{key}={value}" for key, value in variables.items())
        start = f"cd {shlex.quote(str(folder))} && {values} {shlex.join(command)}"
        lines += [f"# on {name}", start]
    return "\n".join([*lines, ""])
