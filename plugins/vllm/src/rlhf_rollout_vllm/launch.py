"""A server that the run starts, and that ends with it."""

import http.client
import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import define, field

from rlhf.errors import RLHFError
from rlhf_rollout_vllm.arguments import PROGRAM, server_variables
from rlhf_rollout_vllm.client import ServerEnded
from rlhf_rollout_vllm.config import VLLMConfig

HOST = "127.0.0.1"
"""Routes that change weights have no password, so that only this host may reach them."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which the server would take itself for a rank."""
SHOWN = 20
"""Lines of the server's log that an error quotes."""
GRACE = 10.0
"""Seconds in which the server has to end after SIGTERM."""


@define(eq=False)
class Server:
    """The process of a server, and its log. It ends when this object is collected."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0
    """Where its part of the log begins, in bytes."""
    stop: Callable[[], object] = field(init=False)
    """Ends the process and those that it has started, if that was not done."""

    @stop.default
    def _stop(self) -> Callable[[], object]:
        return weakref.finalize(self, end, self.process)

    def ended(self, seconds: float = 0.0) -> str | None:
        """Return what an error says of a server that has ended, else None. Waits so many seconds
        for the end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the vLLM server has ended with {how}; {self.told()}"

    def told(self) -> str:
        """Return the last line of an error in the log, and where the log is."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        lines = text.splitlines()
        told = [line.strip() for line in lines[-SHOWN:] if line.strip()]
        errors = [line for line in told if "Error" in line] or told or ["it printed nothing"]
        return f"its log {self.log} says: {errors[-1][:300]}"


def start(
    config: VLLMConfig, arguments: Sequence[str], log: Path, *, again: bool = False
) -> Server:
    """Start a server with these arguments of `vllm serve`, with `again` behind what the log has. It
    ends when the result is collected, when this process ends, or when it is killed. Raises
    RLHFError if its port is in use."""
    assert config.python is not None
    port = _port(config.port)
    path = {**os.environ, **config.environment}.get("PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in OF_RANKS}
    environment |= server_variables(config.environment, path)
    command = [
        config.python, str(PROGRAM), str(os.getpid()), *arguments,
        "--host", HOST, "--port", str(port), *config.arguments,
    ]  # fmt: skip
    if not again:
        log.unlink(missing_ok=True)
    with log.open("ab") as output:
        log_start = output.tell()
        # In a session of its own, it does not get Ctrl-C, and all its processes end together.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    return Server(f"http://{HOST}:{port}", process, log, log_start)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and what it has started."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    due = time.monotonic() + GRACE
    with suppress(ProcessLookupError):
        # Python's resource trackers remove the shared memory of processes that have ended.
        while time.monotonic() < due:
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)


def wait_for(server: Server, *, seconds: float) -> None:
    """Wait until a started server answers. Raises ServerEnded if it ends, and RLHFError if it takes
    too long."""
    due = time.monotonic() + seconds
    address = server.url.removeprefix("http://")
    while True:
        if ended := server.ended():
            raise ServerEnded(ended)
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(address, timeout=5.0)
            connection.request("GET", "/health")
            # Another server may have taken the port.
            if connection.getresponse().status == 200 and server.ended() is None:
                return
        if time.monotonic() > due:
            raise RLHFError(
                f"the vLLM server has not answered within {seconds:g} s; {server.told()}; raise "
                "rollouts.vllm.start_seconds"
            )
        time.sleep(0.1)


def _port(wanted: int | None) -> int:
    """Return a port that is free, the wanted one if there is one."""
    try:
        with socket.create_server((HOST, wanted or 0)) as listening:
            return int(listening.getsockname()[1])
    except OSError:
        raise RLHFError(
            f"rollouts.vllm.port {wanted} is in use; choose another, or remove it"
        ) from None
