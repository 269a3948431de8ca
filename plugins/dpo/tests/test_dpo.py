"""Direct preference optimisation on real engines: its start, its terms, and that hardware does not
matter."""

import io
import json
import math
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import frozen

from rlhf_demo import rows
from rlhf_devkit import Other, Ranks, TrainerConformance, column, tiny

LN_2 = math.log(2)
BCO = "{name: bco_pair, weight: 0.3}, "
ALL = f"[sigmoid, {BCO}{{name: ipo, weight: 0.01}}, {{name: sft, weight: 0.2}}]"
"""Sums per pair, per token and over the step in one loss."""


@frozen
class Inputs:
    """Words of a run of the tiny model in fp32, with clipping that acts at every step."""

    words: list[str]
    cache: str


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """18 pairs to train on and 6 held out, for two epochs at a rate that moves the model."""
    folder = tmp_path_factory.mktemp("dpo")
    train = rows("arithmetic", "train", "preference")[:18]
    held_out = rows("arithmetic", "eval", "preference")[:6]
    words = [
        "--model", str(tiny.make_model(folder / "model")), "--model.dtype", "fp32",
        "--data.train", str(tiny.write_rows(folder / "train.jsonl", train)),
        "--data.eval", str(tiny.write_rows(folder / "eval.jsonl", held_out)),
        "--data.workers", "0", "--batch.size", "4", "--batch.tokens", "256",
        "--optim.lr", "1e-2", "--optim.clip", "0.5", "--train.epochs", "2",
    ]  # fmt: skip
    return Inputs(words, str(folder / "cache"))


def words(inputs: Inputs, output: Path, *more: str) -> list[str]:
    """The whole command line."""
    return [*inputs.words, "--output", str(output), *more]


def plain(inputs: Inputs, output: Path, *more: str) -> tiny.Metrics:
    """The run in plain torch."""
    return tiny.run("dpo", words(inputs, output, *more), inputs.cache, True)


class TestDPO(TrainerConformance):
    """With the cache, which `auto` takes here."""

    trainer = "dpo"
    others: ClassVar[dict[str, Any]] = {
        "loss": "hinge",
        "beta": 0.3,
        "label_smoothing": 0.1,
        "gamma": Other(value=1.0, under={"loss": "simpo"}),
        "discopop_tau": Other(value=0.5, under={"loss": "discopop"}),
        "reference": "none",
        "reference_every": 1,
        "reference_mix": Other(value=1.0, under={"reference_every": 1}),
    }


def test_the_command_finds_a_loss_in_the_current_folder(inputs: Inputs, tmp_path: Path) -> None:
    source = "def halved(chosen, rejected, config):\n    return 0.5 + 0 * chosen\n"
    (tmp_path / "losses_beside_me.py").write_text(source)
    program = Path(sys.executable).with_name("rlhf")
    more = ("--dpo.loss", "losses_beside_me:halved", "--train.stop_at", "1")
    command = [str(program), "run", "dpo", *words(inputs, tmp_path / "run", *more)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"RLHF_CACHE": inputs.cache, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert column([json.loads(line) for line in metrics.splitlines()], "loss") == [0.5]


@pytest.mark.parametrize("losses", ["sigmoid", "[sigmoid, {name: sft, weight: 0.2}]"])
def test_a_run_says_what_it_leaves_out_of_ranked_rows(
    losses: str, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranked = [
        {"prompt": "2 + 2 =", "answers": [" 5", " 4", " 22", " 6"], "scores": [1, 3, 0, 1]},
        {"prompt": "2 + 3 =", "answers": [" 5", " 4", " 1"], "ranks": [1, 2, 3]},
        {"prompt": "2 + 5 =", "chosen": " 7", "rejected": " 8"},
        {"prompt": "2 + 6 =", "answers": [" 7", " 9"], "scores": [0, 0]},
    ]
    data = tmp_path / "ranked.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ranked))
    more = ("--data.train", str(data), "--dpo.loss", losses, "--train.stop_at", "1")
    plain(inputs, tmp_path / "run", *more)
    printed = capsys.readouterr().out
    assert "4 rows; 1 with nothing to train on (dropped), 25.0 %" in printed
    assert (
        "pairs      best against worst in 2 rows with more than two answers; 3 answers between "
        "them ignored\n"
    ) in printed
    labels = "labels     tokens of the chosen answers, over which `sft` of dpo.loss is averaged\n"
    assert (labels in printed) == ("sft" in losses)


@pytest.mark.parametrize(("mode", "exact"), [("adapter", True), ("engine", True), ("cache", False)])
def test_it_starts_at_ln_2_with_margin_0(
    mode: str, exact: bool, inputs: Inputs, tmp_path: Path
) -> None:
    more = ["--lora", "2"] if mode == "adapter" else []
    options = ("--dpo.reference", mode, "--train.eval_at_start", "true", "--train.stop_at", "1")
    metrics = plain(inputs, tmp_path / "run", *options, *more)
    for line, prefix in ((metrics[0], "eval/"), (metrics[1], "")):
        if exact:
            assert line[f"{prefix}rewards/margins"] == 0.0
            assert line[f"{prefix}rewards/chosen"] == 0.0
        assert line[f"{prefix}rewards/margins"] == pytest.approx(0, abs=1e-5)
        assert line[f"{prefix}loss"] == pytest.approx(LN_2, abs=1e-6)


@pytest.fixture(scope="module")
def curve(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tiny.Metrics:
    """The curve in plain torch, one process: what all others are held against."""
    folder = tmp_path_factory.mktemp("plain")
    return plain(inputs, folder / "run", "--dpo.loss", ALL, "--dpo.reference", "engine")


SHARDED = ("--deepspeed.persistence_threshold", "0", "--deepspeed.frozen", "3")
CASES = {
    "one rank, small batches, cache": (1, "0", "192", "cache"),
    "two ranks, stage 2, engine": (2, "2", "192", "engine"),
    "two ranks, stage 3, engine": (2, "3", "1024", "engine"),
    "two ranks, stage 3, cache": (2, "3", "192", "cache"),
}
MORE = ("two ranks, stage 2, engine", "two ranks, stage 3, engine")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix) if name in MORE else name for name in CASES],
)
def test_the_curve_does_not_depend_on_the_hardware(
    name: str,
    curve: tiny.Metrics,
    inputs: Inputs,
    one: Ranks,
    two: Ranks,
    tmp_path: Path,
) -> None:
    world, stage, tokens, mode = CASES[name]
    more = ("--deepspeed.stage", stage, "--batch.tokens", tokens, "--dpo.reference", mode)
    sharded = SHARDED if stage == "3" else ()
    arguments = words(inputs, tmp_path / "run", "--dpo.loss", ALL, *more, *sharded)
    cache = str(tmp_path / "cache") if mode == "cache" else inputs.cache
    metrics = (one if world == 1 else two).run(tiny.run, "dpo", arguments, cache)[0]
    assert column(curve, "loss")[-1] < 0.9 * column(curve, "loss")[0]
    for key in ("loss", "rewards/margins", "rewards/chosen", "nll_loss", "entropy"):
        assert column(metrics, key) == pytest.approx(column(curve, key), rel=1e-4, abs=1e-4), key
    assert column(metrics, "loss") == pytest.approx(column(curve, "loss"), abs=1e-5)
    assert metrics[-1]["eval/loss"] == pytest.approx(curve[-1]["eval/loss"], abs=1e-5)


def printed(arguments: list[str], cache: str) -> tuple[tiny.Metrics, str]:
    """The metrics of a run and what this rank printed."""
    with redirect_stdout(io.StringIO()) as out:
        metrics = tiny.run("dpo", arguments, cache)
    return metrics, out.getvalue()


def test_a_reference_in_shards_may_lie_in_the_hosts_memory(
    curve: tiny.Metrics, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    place = ("--deepspeed.stage", "2", "--deepspeed.frozen", "offload")
    sharded = (*place, "--deepspeed.persistence_threshold", "0", "--dpo.reference", "engine")
    arguments = words(inputs, tmp_path / "run", "--dpo.loss", ALL, *sharded)
    metrics, text = two.run(printed, arguments, inputs.cache)[0]
    assert column(metrics, "loss") == pytest.approx(column(curve, "loss"), abs=1e-5)
    plans = json.loads((tmp_path / "run" / "plan.json").read_text())
    zero = plans["reference"]["settings"]["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"]) == (3, "cpu")
    assert plans["policy"]["stage"] == 2
    assert "backend    deepspeed: ZeRO 2, fp32, 2 ranks, " in text
    frozen = "           reference: ZeRO 3 (as configured), fp32, 2 ranks, parameters on the CPU\n"
    assert frozen in text


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.matrix) for stage in ("0", "2")), "3"]
)
def test_an_adapters_reference_is_right_at_every_stage(
    stage: str, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    adapter = ("--lora", "2", "--optim.lr", "1e-2")
    expected = plain(inputs, tmp_path / "plain", *adapter)
    sharded = SHARDED if stage == "3" else ()
    more = (*adapter, "--deepspeed.stage", stage, *sharded)
    metrics = two.run(tiny.run, "dpo", words(inputs, tmp_path / "run", *more), inputs.cache)[0]
    assert column(expected, "loss")[0] == pytest.approx(LN_2)
    assert column(expected, "loss")[-1] < LN_2 - 0.01
    for key in ("loss", "rewards/margins"):
        found = column(metrics, key)
        assert found == pytest.approx(column(expected, key), rel=1e-4, abs=1e-5), key


def test_a_reference_moves_after_the_step_that_completes_its_count(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    more = ("--train.steps", "4", "--dpo.reference_every", "2", "--dpo.reference_mix", "1")
    metrics = one.run(tiny.run, "dpo", words(inputs, tmp_path / "run", *more), inputs.cache)[0]
    at_ln_2 = [loss == pytest.approx(LN_2, abs=1e-6) for loss in column(metrics, "loss")]
    assert at_ln_2 == [True, False, True, False]


MOVING = ("--dpo.reference_every", "2", "--dpo.reference_mix", "0.5")


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.matrix) for stage in ("0", "2")), "3"]
)
def test_a_reference_that_moves_is_the_same_anywhere_and_resumes_to_the_last_bit(
    stage: str, inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    expected = plain(inputs, tmp_path / "plain", *MOVING)
    sharded = SHARDED if stage == "3" else ()

    def run(folder: str, *more: str) -> tiny.Metrics:
        options = (*MOVING, "--deepspeed.stage", stage, *sharded, *more)
        return two.run(tiny.run, "dpo", words(inputs, tmp_path / folder, *options), inputs.cache)[0]

    straight = run("straight")
    run("halves", "--train.stop_at", "5")
    halves = run("halves", "--resume")
    found = column(straight, "loss")
    assert found == pytest.approx(column(expected, "loss"), abs=1e-5)
    for key in ("loss", "grad_norm", "rewards/margins", "logps/rejected"):
        assert column(halves, key) == column(straight, key), key
    assert halves[-1]["eval/loss"] == straight[-1]["eval/loss"]


def test_the_mix_reaches_the_curve(inputs: Inputs, tmp_path: Path) -> None:
    every = ("--train.steps", "3", "--dpo.reference_every", "1")
    little = plain(inputs, tmp_path / "little", *every, "--dpo.reference_mix", "0.1")
    whole = plain(inputs, tmp_path / "whole", *every, "--dpo.reference_mix", "1")
    assert column(little, "loss") != pytest.approx(column(whole, "loss"), abs=1e-4)
    # A reference that is replaced each step is the policy: the next step starts at ln 2.
    assert column(whole, "loss") == pytest.approx([LN_2] * 3)
