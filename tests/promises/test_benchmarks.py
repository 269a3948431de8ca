"""The benchmarks run, on the smallest shapes: how fast is nothing that a test could say."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_devkit import short_run, tiny

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEXT = math.nextafter(0.1, 1)


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.matrix
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


@pytest.mark.matrix
def test_curves_are_those_of_the_slow_path(tmp_path: Path) -> None:
    words = ["--steps", "3", "--size", "4", "--vocabulary", "512", "--output", str(tmp_path)]
    line = run("curves.py", "rm", *words, "--", "--optim.lr", "1e-3").splitlines()[-1]
    name, first, last, slow, largest, _ = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, last) == ("rm", slow)
    assert first != last
    assert float(largest) < 1e-5


@pytest.mark.matrix
def test_the_step_is_measured_against_a_bare_loop(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    table = run(
        "overhead.py", "--stages", "0", "--steps", "6", "--size", "4", "--json", str(numbers)
    )
    (found,) = json.loads(numbers.read_text())
    assert found["bare"] > 0
    assert table.splitlines()[-1].startswith("| 0 | ")


@pytest.mark.matrix
def test_bits_of_a_run_are_recorded_and_equal_those_of_the_same_run(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("before.json", "after.json")]
    for file in files:
        run("bits.py", "record", str(file), "--only", "one rank")
    (record,) = json.loads(files[0].read_text()).values()
    assert [line["step"] for line in record["metrics"]] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert record["weights"]
    assert "| one rank | 8 | " in run("bits.py", "compare", *map(str, files))


def test_one_bit_that_differs_is_named(tmp_path: Path) -> None:
    record = {"metrics": [{"step": 1, "loss": 0.1}], "weights": {"head": "0a"}}
    changes = {
        "step 1 loss: 0.1, then 0.10000000000000002": {"metrics": [{"step": 1, "loss": NEXT}]},
        "weight head": {"weights": {"head": "0b"}},
        "1 lines of metrics, then 0": {"metrics": []},
    }
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({"one": record}))
    for difference, change in changes.items():
        after.write_text(json.dumps({"one": record | change}))
        command = [sys.executable, str(BENCHMARKS / "bits.py"), "compare", str(before), str(after)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.endswith(f" | {difference} |\n")


@pytest.mark.matrix
def test_a_server_under_load_answers_every_request_once(tmp_path: Path) -> None:
    words = [*short_run(tmp_path, "preference"), "--output", str(tmp_path / "run")]
    tiny.run("rm", words, str(tmp_path / "cache"), True)
    load = ["--clients", "2", "24", "--requests", "48", "--rows", "7", "--queue", "2"]
    lines = run("serve.py", str(tmp_path / "run"), str(tmp_path / "eval.jsonl"), *load).splitlines()
    assert lines[-1] == "lost 0, wrong 0, other answers none"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[-4:-1]]
    assert [(row[0], row[5]) for row in rows] == [("2", "48"), ("24", "48"), ("24", "48")]
    assert [int(row[6]) > 0 for row in rows] == [False, False, True]


@pytest.mark.matrix
@pytest.mark.parametrize("more", [[], ["--write"]])
def test_grpo_is_measured_on_recorded_and_on_new_answers(more: list[str], tmp_path: Path) -> None:
    words = ["G1", "--divide", "64", "--steps", "2", "--vocabulary", "512", *more]
    run("grpo.py", *words, "--output", str(tmp_path))
    (result,) = json.loads((tmp_path / "grpo.json").read_text())
    assert result["who"] == "rlhf"
    assert result["rows_per_s"] > 0
