"""A server that the run starts: its arguments and its end."""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from fake_venv import make_environment
from fake_vllm import wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import RLHFError
from rlhf_devkit import tiny
from rlhf_rollout_vllm.arguments import PROGRAM
from rlhf_rollout_vllm.config import VLLMConfig
from rlhf_rollout_vllm.connection import launch
from rlhf_rollout_vllm.engine import VLLM
from rlhf_rollout_vllm.launch import Server, end, start, wait_for

TESTS = Path(__file__).parent


def settings(tmp_path: Path, **more: Any) -> VLLMConfig:
    # A Python of another environment finds the packages of the tests, too.
    path = os.pathsep.join([str(TESTS / "fake_environment"), str(TESTS), *filter(None, sys.path)])
    environment = {"PYTHONPATH": path, "SEEN": str(tmp_path / "seen")}
    options = {"python": sys.executable, "environment": environment, "start_seconds": 100.0}
    return VLLMConfig(**{**options, "folder": str(tmp_path), **more})


def problem(act: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        act()
    return str(error.value)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.matrix
def test_a_started_server_answers_and_ends_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make_model(tmp_path / "model")
    (tmp_path / "run").mkdir()
    words = tiny.short_run(tmp_path / "run", "demonstration")
    words += ["--rollouts.engine", "vllm", "--rollouts.vllm.url", "http://127.0.0.1:1"]
    session = tiny.in_plain_torch("sft", [*words, "--model", str(model)], str(tmp_path / "c"))[1]
    python = make_environment(tmp_path / "env", version=None, packages=())
    section = settings(tmp_path, python=python, arguments=("--enforce-eager",), restarts=0)
    rollouts = attrs.evolve(session.config.rollouts, vllm=section)
    config = attrs.evolve(session.config, rollouts=rollouts, output=str(tmp_path))
    writer = VLLM(
        config=config, tokenizer=session.trainer.tokenizer, mesh=session.mesh, hooks=session.hooks
    )
    monkeypatch.setenv("RANK", "0")
    drawn = writer.sample(
        session.engine, [[5, 6, 7], [8, 9]], seeds=[1, 2], ends=[2], max_new_tokens=4,
        max_tokens=60, temperature=0.0,
    )  # fmt: skip
    monkeypatch.delenv("RANK")
    assert [len(each.tokens) for each in drawn] == [4, 4]
    process, _, folder, *arguments = (tmp_path / "seen").read_text().split("\n")
    port = arguments[arguments.index("--port") + 1]
    assert arguments == [
        "--served-model-name", "policy", "--dtype", "float32", "--max-model-len", "60",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-scale-out", "--load-format", "dummy", "--weight-transfer-config",
        '{"backend": "rlhf_files"}', "--host", "127.0.0.1", "--port", port, "--enforce-eager",
    ]  # fmt: skip
    assert {"config.json", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    assert writer.notes[0].startswith(f"rollouts   vLLM at http://127.0.0.1:{port}, started in ")
    assert writer.notes[0].endswith(f" s; its log is {tmp_path / 'vllm.log'}")
    assert (tmp_path / "vllm.log").read_text().startswith("loading\n")
    assert is_running(int(process))
    os.kill(int(process), signal.SIGKILL)
    assert wait_until(lambda: not is_running(int(process)))
    text = problem(
        lambda: writer.sample(
            session.engine, [[5, 6, 7]], seeds=[1], ends=[2], max_new_tokens=4, max_tokens=60,
            temperature=0.0,
        )
    )  # fmt: skip
    assert text == (
        f"the vLLM server has ended with SIGKILL; its log {tmp_path / 'vllm.log'} says: loading"
    )


def test_a_server_whose_port_is_in_use_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tiny.make_model(tmp_path / "model")
    module = torch.nn.Module()
    module.causal = module.model = AutoModelForCausalLM.from_pretrained(folder)
    engine: Any = SimpleNamespace(module=module)
    config: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="fp32", trust_remote_code=False), output=None
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    python = make_environment(tmp_path / "env", version=None, packages=())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        section = settings(tmp_path, python=python, port=taken.getsockname()[1])
        text = problem(lambda: launch(config, section, engine, tokenizer, max_tokens=60))
    assert "is in use" in text
    gc.collect()
    assert not [*tmp_path.glob("rlhf-vllm-model-*")]


def test_a_server_that_does_not_start_is_told_with_its_own_error(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    server = start(settings(tmp_path, arguments=("--fail",)), ["model"], log)
    assert problem(lambda: wait_for(server, seconds=60)) == (
        f"the vLLM server has ended with exit code 1; its log {log} says: ValueError: the KV cache "
        "does not fit"
    )


def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    section = settings(tmp_path)
    server = start(section, ["no/such/model"], tmp_path / "vllm.log")
    text = problem(partial(wait_for, server, seconds=0.05))
    assert text.startswith("the vLLM server has not answered within 0.05 s; its log ")
    assert text.endswith("; raise rollouts.vllm.start_seconds")
    process = server.process
    del server
    gc.collect()  # The error has held it.
    assert wait_until(lambda: process.poll() is not None)


def test_a_server_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from rlhf_rollout_vllm.config import VLLMConfig\n"
        "from rlhf_rollout_vllm.launch import start\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"environment = {settings(tmp_path).environment!r}\n"
        "section = VLLMConfig(python=sys.executable, environment=environment)\n"
        "server = start(section, ['x'], folder / 'log')\n"
        "print(server.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert run.stdout is not None
    process = int(run.stdout.readline())
    run.kill()
    run.communicate()
    assert wait_until(lambda: not is_running(process))


SHARED = """
import os, signal, sys
from multiprocessing.shared_memory import SharedMemory

def main():
    memory = SharedMemory(create=True, size=1000)
    signal.signal(signal.SIGTERM, lambda *arguments: os._exit(0))
    print(os.getpid(), memory.name, flush=True)
    while True:
        signal.pause()
"""
"""A server with shared memory, which Python's resource tracker removes after its end."""


def started(*command: str, **environment: str) -> tuple[subprocess.Popen[bytes], int, Path]:
    """Start a server with shared memory; return what was started, the server's id, and the file."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, env=os.environ | environment
    )
    assert process.stdout is not None
    server, name = process.stdout.readline().decode().split()
    memory = Path("/dev/shm", name)
    assert memory.exists()
    return process, int(server), memory


def test_a_server_that_is_ended_leaves_no_shared_memory() -> None:
    process, _, memory = started(sys.executable, "-c", f"{SHARED}main()")
    end(process)
    assert not memory.exists()


def test_a_server_whose_run_was_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    package = tmp_path / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SHARED)
    script = f"{sys.executable} {PROGRAM} $$ & wait"
    run, server, memory = started("sh", "-c", script, PYTHONPATH=str(tmp_path))
    run.kill()
    run.wait()
    assert wait_until(lambda: not is_running(server))
    assert wait_until(lambda: not memory.exists(), seconds=2.0)


def test_a_port_that_is_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = problem(lambda: start(settings(tmp_path, port=port), ["x"], tmp_path / "log"))
    assert text == f"rollouts.vllm.port {port} is in use; choose another, or remove it"


def test_another_server_at_the_port_is_not_taken_for_one_that_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("OSError: address already in use\n")
    process = subprocess.Popen(["sleep", "60"])

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            process.kill()
            process.wait()
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{other.server_port}"
        text = problem(lambda: wait_for(Server(url, process, log), seconds=20))
        thread.join()
    assert text == (
        f"the vLLM server has ended with SIGKILL; its log {log} says: OSError: address already in "
        "use"
    )


def test_the_log_has_no_errors_of_an_earlier_run(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ValueError: an earlier one\n")
    environment = {"PYTHONPATH": str(tmp_path)}  # Without a vLLM.
    server = start(settings(tmp_path, environment=environment), ["model"], log)
    assert problem(lambda: wait_for(server, seconds=60)).endswith("No module named 'vllm'")
    assert "an earlier one" not in log.read_text()
