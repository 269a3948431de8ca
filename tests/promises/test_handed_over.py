"""Ranks do what their launcher has read: a file that is saved in between changes nothing."""

import os
import threading
from pathlib import Path

import yaml

import sft_runs
from rlhf_devkit.forked import Forked
from sft_runs import Inputs


def test_the_configuration_is_read_once_for_all_ranks(inputs: Inputs, tmp_path: Path) -> None:
    # A pipe can be read once: a second reader would wait for ever.
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    words = sft_runs.words(inputs, tmp_path / "run", "--train.steps", "1", "--nproc", "2")
    settings = yaml.safe_dump({"optim": {"weight_decay": 0.125}})
    writer = threading.Thread(target=pipe.write_text, args=[settings], daemon=True)
    writer.start()
    environment = os.environ | {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"}
    process = Forked("-m", "rlhf", "run", "sft", str(pipe), *words, environment=environment)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["optim"]["weight_decay"] == 0.125
