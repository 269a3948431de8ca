"""DeepSpeed's own launcher starts `rlhf`."""

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_devkit import short_run
from rlhf_devkit.forked import Forked


def launched(port: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`rlhf` with these words, on two ranks that DeepSpeed's launcher starts."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    command = [*launcher, f"--master_port={port}", "--module", "rlhf", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_launcher_of_deepspeed_may_pass_its_argument(port: int) -> None:
    done = launched(port, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"name": "deepspeed"') == 2
    assert "--local_rank=1" in done.stderr + done.stdout


@pytest.mark.matrix
def test_the_launcher_of_deepspeed_starts_a_run(tmp_path: Path, port: int) -> None:
    words = [*short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    done = launched(port, "run", "sft", *words)
    assert done.returncode == 0, done.stderr
    assert "devices    2 x cpu" in done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 4


MEETS = """
import sys
from datetime import timedelta
from rlhf.errors import RLHFError
from rlhf_plugin_deepspeed.rendezvous import meet
try:
    meet(timedelta(seconds=float(sys.argv[1])))
except RLHFError as error:
    print(error)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "meets.py"
    path.write_text(MEETS)
    return path


def started(program: Path, rank: int, port: int, *, seconds: float) -> Forked:
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    place |= {"LOCAL_RANK": "0", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = {name: value for name, value in os.environ.items() if "ELASTIC" not in name}
    return Forked(str(program), str(seconds), environment=environment | place)


def test_ranks_that_do_not_come_are_named(port: int, program: Path) -> None:
    missing = (
        f"2 of 4 ranks did not connect to 127.0.0.1:{port} within 0.05 minutes: 1, 3; see "
        "their output, or raise deepspeed.timeout\n"
    )
    processes = [started(program, rank, port, seconds=3) for rank in (0, 2)]
    messages = [process.communicate(timeout=300)[0] for process in processes]
    assert messages[0] == missing
    # Rank 0 may have ended already.
    assert messages[1] in (missing, "rank 0 ended before all ranks had connected\n")


def test_a_rank_that_does_not_reach_rank_0_names_the_address(program: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # Nothing listens here.
        port = probe.getsockname()[1]
        message = started(program, 1, port, seconds=0.2).communicate()[0]
    assert message.startswith(f"rank 1 cannot connect to rank 0 at 127.0.0.1:{port} (")
    assert message.endswith("); check MASTER_ADDR and MASTER_PORT, or raise deepspeed.timeout\n")
