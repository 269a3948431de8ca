"""Start the ranks of a run on this machine.

torch's elastic launcher exits with 1 on SIGTERM, kills a save after 30 s, and leaves its ranks
running when it is killed itself (tried). This launcher turns SIGTERM and Ctrl-C into a saved run
and exit code 143, and its ranks die with it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO

from rlhf.launch import places
from rlhf.launch.hosts import ONE_HOST, Host
from rlhf.launch.signals import (
    GATE,
    INTERRUPTED,
    OUTSIDE_OF_STEPS,
    PARENT,
    PROBLEMS,
    REQUEST,
    STOPPED,
    Stopped,
    catch,
    numbers,
    quit_on_next_ctrl_c,
)


def num_devices() -> int:
    """Return the number of accelerators of this machine, or 1 for the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return 1 if accelerator is None else torch.accelerator.device_count()


def wait_at_gate() -> None:
    """Wait until our launcher, if it started this rank, has prepared the run."""
    gate = os.environ.get(GATE)
    if gate is not None and not os.read(int(gate), 1):
        sys.exit(1)  # The launcher has died or been stopped.


class Ranks:
    """`count` processes of one command with the variables of torch's rendezvous."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        patience: float,
        *,
        grace: float = 10.0,
        host: Host = ONE_HOST,
        signals: Sequence[str] = ("TERM",),
        places_in: Path | None = None,
        silence: float = 45.0,
        output: IO[bytes] | None = None,
        prepare: Callable[[], object] = lambda: None,
        variables: Mapping[str, str] = MappingProxyType({}),
        request: bytes = b"",
    ) -> None:
        """`patience` limits the time in which a stopped run may save, `grace` the time in which the
        other ranks may end by themselves after one has failed; both in seconds. `signals` stop the
        run. After one, ranks that wait for one another, by their places in the folder `places_in`,
        are ended once they have been silent for `silence` seconds. `output` gets what the ranks
        print. `prepare` runs while they import; they wait for its end in `wait_at_gate`. If it
        raises, they are killed. `variables` join their environment. They read `request`."""
        self._patience, self._grace, self._silence = patience, grace, silence
        self._places_in, self._began = places_in, time.time()
        self._preparing = False
        self._deadline: float | None = None
        self._problems = tempfile.TemporaryFile()  # noqa: SIM115
        self._stop = numbers(signals)[0]
        self.processes: list[subprocess.Popen[bytes]] = []
        # Before the first start: a signal after it must reach the ranks.
        self._caught = catch(self._on_signal, signals)
        self._first = host.number * count
        held = self._caught.enter_context(hold_port())
        gate, opener = os.pipe()
        files = {PROBLEMS: self._problems.fileno(), GATE: gate}
        with tempfile.TemporaryFile(buffering=0) as given:
            given.write(request)
            if request:
                files[REQUEST] = given.fileno()
            port = host.port or held.getsockname()[1]
            descriptors = {name: str(file) for name, file in files.items()}
            shared = _variables(count, host, port) | descriptors
            for local in range(count):
                own = {"RANK": str(self._first + local), "LOCAL_RANK": str(local)}
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**shared, **own, **variables},
                        stdout=output,
                        stderr=output,
                        pass_fds=files.values(),
                    )
                )
        os.close(gate)
        self._open_gate(opener, prepare)

    def _open_gate(self, opener: int, prepare: Callable[[], object]) -> None:
        """Run `prepare`, then let the ranks continue."""
        self._preparing = True
        try:
            if self._deadline is not None:
                raise Stopped
            prepare()
            with suppress(BrokenPipeError):  # All have ended.
                os.write(opener, bytes(len(self.processes)))
        except Stopped:
            pass
        except BaseException:
            self._kill()
            self._caught.close()
            raise
        finally:
            self._preparing = False
            os.close(opener)

    def wait(self) -> int:
        """Return the exit code of the run; the first rank that fails ends the others."""
        try:
            while (code := self._poll()) is None:
                time.sleep(0.05)
            return code
        except KeyboardInterrupt:
            self._end(2.0)
            raise
        finally:
            self._caught.close()

    def problem(self) -> str:
        """Return the first error that a rank has printed and the user can fix, or where to look."""
        self._problems.seek(0)
        first = self._problems.readline().decode().partition(" ")[2].strip()
        return first or "a process of the run has failed; its output says why"

    def _poll(self) -> int | None:
        """Return the exit code of the run, None while it continues. End it if a rank has failed, or
        if it was stopped and will not save any more."""
        codes = self._codes()
        if None not in codes:
            return self._exit_code(codes)
        if any(code not in (None, 0, STOPPED) for code in codes):
            return self._end(self._grace)
        if STOPPED in codes and self._deadline is None:
            self._stop_ranks()  # A signal to one rank only.
        if late := self._late():
            print(f"error: {late}", file=sys.stderr)
            self._kill()
            return STOPPED
        return None

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            quit_on_next_ctrl_c(announce=True)
        self._stop_ranks()
        if self._preparing:
            raise Stopped

    def _stop_ranks(self) -> None:
        self._deadline = self._deadline or time.monotonic() + self._patience
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(self._stop)

    def _late(self) -> str | None:
        """Return why a run that was stopped will not save any more, if so."""
        if self._deadline is None:
            return None
        if time.monotonic() > self._deadline:
            within = f"within {self._patience:g} s; raise checkpoint.stop_timeout"
            return f"the stopped run did not save {within}"
        waiting = places.explain_wait(self._places(), silent_for=self._silence)
        return waiting and (
            f"{waiting}: the ranks wait for one another, so the run was stopped without saving; "
            "continue from the last checkpoint with --resume"
        )

    def _places(self) -> dict[int, places.Place]:
        folder = self._places_in
        return {} if folder is None else places.read(folder, since=self._began)

    def _end(self, grace: float) -> int:
        """Give the other ranks time to end with the same error, then kill them."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and None in self._codes():
            time.sleep(0.05)
        codes = self._codes()
        self._kill()
        return self._exit_code(codes)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _exit_code(self, codes: Sequence[int | None]) -> int:
        if self._deadline is not None and {-self._stop, -signal.SIGTERM, INTERRUPTED} & set(codes):
            if codes[0] != STOPPED:  # Else rank 0 has printed a line.
                print(OUTSIDE_OF_STEPS, flush=True)
            return STOPPED
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                rank += self._first
                place = self._places().get(rank)
                seen = f" in {place} of step {place.step}" if place else ""
                print(
                    f"error: rank {rank} was killed by {name}{seen}; the other ranks were stopped",
                    file=sys.stderr,
                )
                return 1
        failed = [code for code in codes if code]
        return failed[0] if failed else 0


def _variables(count: int, host: Host, port: int) -> dict[str, str]:
    """Return the environment of `count` ranks on this host."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    return os.environ | {
        "WORLD_SIZE": str(count * host.hosts),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": host.address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        PARENT: str(os.getpid()),
    }


def hold_port() -> socket.socket:
    """Return a socket that keeps a free port: until it is closed, only a server that asks for this
    port and for SO_REUSEADDR, as torch's store does, gets it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
