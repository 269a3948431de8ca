"""What must answer at once imports nothing heavy; benchmarks/startup.py measures the time."""

import subprocess
import sys

import pytest

HEAVY = "torch transformers deepspeed peft datasets numpy rich safetensors torchdata"
PROGRAM = f"""
import sys
from rlhf.commands.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(sorted(set(sys.modules) & set("{HEAVY}".split())))
"""


@pytest.mark.parametrize(
    "words",
    ["--help", "plugins", "config sft", "run sft --optim.lrr 1e-5", "run sft --help", "runs ."],
)
def test_the_light_side_imports_nothing_heavy(words: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_imports_no_library_that_it_may_not_need() -> None:
    """`datasets` is needed only for rows that are not in the cache, mlflow only as an observer."""
    program = (
        "import sys, rlhf.train.rank, rlhf_plugin_deepspeed.backend\n"
        "print(sorted({'datasets', 'mlflow'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
