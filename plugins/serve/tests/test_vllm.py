"""vLLM serves the exported reward model, and `rlhf serve --check` agrees with it.

vLLM has an environment of its own (docs/serve.md), which RLHF_VLLM names: the folder of a virtual
environment that has the command `vllm`.
"""

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.cli import main
from rlhf_devkit import short_run, tiny

SECONDS = 300
"""Time in which vLLM has to start."""


@pytest.mark.matrix
def test_vllm_serves_the_rewards_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Path(os.environ.get("RLHF_VLLM", "")) / "bin" / "vllm"
    if not command.is_file():
        pytest.skip("RLHF_VLLM names no environment with vLLM (docs/serve.md says how to make it)")
    words = short_run(tmp_path, "preference")
    config = LlamaConfig.from_pretrained(tmp_path / "model", head_dim=64)  # vLLM does not know 8.
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    tiny.run("rm", [*words, "--output", str(run)], str(tmp_path / "cache"), True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [str(command), "serve", str(run / "model"), "--runner", "pooling"]
    options = ["--dtype", "float32", "--port", str(port), "--max-model-len", "512"]
    # GiB of memory, of which it takes most by default; and sockets, which it leaves behind.
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": str(tmp_path)}
    log = tmp_path / "vllm.txt"
    with (
        log.open("w") as file,
        subprocess.Popen([*serve, *options], stdout=file, stderr=file, env=env) as server,
    ):
        try:
            wait(server, f"http://127.0.0.1:{port}/health", log)
            url = f"http://127.0.0.1:{port}/classify"
            assert main(["serve", "--check", url, str(run), str(tmp_path / "eval.jsonl")]) == 0
        finally:
            server.terminate()
    assert f"{url} agrees with {run}/model (allowed: 0.001)" in capsys.readouterr().out


def wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])
