"""Start the ranks of a run on this machine, or join the ones that a launcher has started.

torch's elastic launcher exits 1 on SIGTERM, kills a save after 30 s and leaves its ranks behind
when it is killed itself (tried); this one turns SIGTERM and Ctrl-C into a saved run and 143, and
its ranks die with it.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rlhf.errors import RLHFError
from rlhf.launch.signals import PARENT, catch, end_at_the_next, give_back

STOPPED, INTERRUPTED = 143, 130
PR_SET_PDEATHSIG = 1


def num_devices() -> int:
    """Accelerators of this machine; 1 where there is none, since the CPU is one device."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return 1 if accelerator is None else torch.accelerator.device_count()


def join_slurm() -> None:
    """Under `srun` with several tasks, give the process the variables that torch's rendezvous
    reads."""
    env = os.environ
    # A batch script itself has the allocation's SLURM_NTASKS and no step's.
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in env or tasks == "1" or "SLURM_PROCID" not in env:
        return
    if "MASTER_ADDR" not in env:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
        asked = ["scontrol", "show", "hostnames", hosts]
        found = shutil.which("scontrol") and subprocess.run(
            asked, capture_output=True, text=True, check=False
        )
        if not found or found.returncode or not found.stdout:
            raise RLHFError(
                f"the first host of {hosts!r} cannot be found with scontrol: set MASTER_ADDR"
            )
        env["MASTER_ADDR"] = found.stdout.split()[0]
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], tasks
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")


def die_with_parent() -> None:
    """Have the kernel kill this rank when the launcher of ours that started it is gone."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # It died before the kernel knew.
        os.kill(os.getpid(), signal.SIGKILL)


class Ranks:
    """`count` processes of one command with the variables of torch's rendezvous."""

    def __init__(
        self, command: Sequence[str], count: int, patience: float, *, grace: float = 10.0
    ) -> None:
        """`patience` is how long a stopped run may save, `grace` how long the others may take to
        end by themselves after one rank has failed; both in seconds."""
        self._patience, self._grace = patience, grace
        self._deadline: float | None = None
        # A signal between the first start and the handler would leave ranks without a parent's
        # word.
        self._previous = catch(self._on_signal)
        self.processes: list[subprocess.Popen[bytes]] = []
        port = str(_free_port())
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            place |= {"LOCAL_WORLD_SIZE": str(count), PARENT: str(os.getpid())}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
            self.processes.append(subprocess.Popen(command, env=os.environ | place))

    def wait(self) -> int:
        """The exit code of the whole: the first rank that failed ends the others."""
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                if all(code is not None for code in codes):
                    return self._verdict(codes)
                if any(code not in (None, 0, STOPPED) for code in codes):
                    return self._end(self._grace)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    print(
                        f"error: the run was stopped and did not save within {self._patience:g} s: "
                        "raise checkpoint.stop_timeout",
                        file=sys.stderr,
                    )
                    self._kill()
                    return STOPPED
                time.sleep(0.05)
        except KeyboardInterrupt:
            self._end(2.0)
            raise
        finally:
            give_back(self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            end_at_the_next(told=True)
        self._deadline = self._deadline or time.monotonic() + self._patience
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def _end(self, grace: float) -> int:
        """Give the others time to end by the same error, then kill them."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self.processes
        ):
            time.sleep(0.05)
        codes = [process.poll() for process in self.processes]
        self._kill()
        return self._verdict(codes)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _verdict(self, codes: Sequence[int | None]) -> int:
        if self._deadline is not None and {-signal.SIGTERM, INTERRUPTED} & set(codes):
            print("stopped outside of the steps; go on with --resume", flush=True)
            return STOPPED
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                print(
                    f"rank {rank} was ended by {name}; the other ranks were stopped",
                    file=sys.stderr,
                )
                return 1
        failed = [code for code in codes if code]
        return failed[0] if failed else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
