"""The benchmarks run, on the smallest shapes: how fast is nothing that a test could say."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_workflow_is_measured_through_the_command(tmp_path: Path) -> None:
    words = ["--steps", "2", "--size", "4", "--vocabulary", "2048", "--output", str(tmp_path)]
    table = run("workflows.py", *words).strip().splitlines()
    found = json.loads((tmp_path / "workflows.json").read_text())
    assert [result["workflow"] for result in found] == ["sft", "dpo", "rm", "kd", "kto", "prm"]
    for result in found:
        assert len(result["losses"]) == 2
        assert result["rows_per_s"] > 0
        assert result["first_step_s"] > 0
    assert [line.split(" | ")[0] for line in table[-6:]] == [
        f"| {result['workflow']}" for result in found
    ]


def test_curves_are_those_of_the_slow_path(tmp_path: Path) -> None:
    words = ["--steps", "3", "--size", "4", "--vocabulary", "512", "--output", str(tmp_path)]
    line = run("curves.py", "rm", *words, "--", "--optim.lr", "1e-3").splitlines()[-1]
    name, first, last, slow, largest, _ = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, last) == ("rm", slow)
    assert first != last
    assert float(largest) < 1e-5


def test_the_step_is_measured_against_a_bare_loop(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    table = run(
        "overhead.py", "--stages", "0", "--steps", "6", "--size", "4", "--json", str(numbers)
    )
    (found,) = json.loads(numbers.read_text())
    assert found["bare"] > 0
    assert table.splitlines()[-1].startswith("| 0 | ")
