"""Ranks do what their launcher has read: a file that is saved in between changes nothing. The
processes are those of a user, no forks."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import yaml

import sft_runs
from sft_runs import Inputs


def test_the_configuration_is_read_once_for_all_ranks(inputs: Inputs, tmp_path: Path) -> None:
    # A pipe can be read once: a second reader would wait for ever.
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "1", "--nproc", "2")
    settings = yaml.safe_dump({"optim": {"weight_decay": 0.125}})
    writer = threading.Thread(target=pipe.write_text, args=[settings], daemon=True)
    writer.start()
    done = subprocess.run(
        [sys.executable, "-m", "rlhf", "run", "sft", str(pipe), *words],
        env=os.environ | {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["optim"]["weight_decay"] == 0.125
