"""What must answer at once: nothing heavy imported, 0.2 s of CPU time; plugins as installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = "torch transformers deepspeed peft datasets numpy rich safetensors torchdata"
PROGRAM = f"""
import sys
from rlhf.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(sorted(set(sys.modules) & set("{HEAVY}".split())))
"""


@pytest.mark.parametrize(
    "words", ["--help", "plugins", "config sft", "run sft --optim.lrr 1e-5", "run sft --help"]
)
def test_the_light_side_imports_nothing_heavy(words: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_command_takes_a_fifth_of_a_second_of_cpu_time() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "startup.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
