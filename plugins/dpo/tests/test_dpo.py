"""Direct preference optimisation on real engines: its start, its terms, and that hardware does not
matter."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import tiny
from rlhf.config.reader import read_config
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.demo import rows
from rlhf.errors import RLHFError
from rlhf.execute import run_rank
from rlhf.sums import weighted_loss
from rlhf.testing.conformance import Other, TrainerConformance
from rlhf.testing.plain import PlainBackend
from rlhf.testing.ranks import Ranks
from rlhf_plugin_dpo.config import DPOConfig, LossEntry
from rlhf_plugin_dpo.trainer import DPOTrainer

LN_2 = math.log(2)
BCO = "{name: bco_pair, weight: 0.3}, "
ALL = f"[sigmoid, {BCO}{{name: ipo, weight: 0.01}}, {{name: sft, weight: 0.2}}]"
"""Sums per pair, per token and over the step in one loss."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tiny.Inputs:
    """The tiny model, 18 pairs to train on and 6 held out."""
    made = tiny.make(tmp_path_factory.mktemp("dpo"))
    tiny.write(made.train, rows("arithmetic", "train", "preference")[:18])
    tiny.write(made.eval, rows("arithmetic", "eval", "preference")[:6])
    return made


def run_dpo(words: list[str], cache: str, backend: Any = None) -> list[dict[str, Any]]:
    """`rlhf run dpo` on this rank: what metrics.jsonl holds afterwards."""
    os.environ["RLHF_CACHE"] = cache
    request = read_config("dpo", overrides=words)
    assert run_rank(request, backend=backend) == 0
    return tiny.read_metrics(Path(request.config.output or ""))


def words(inputs: tiny.Inputs, output: Path, *more: str) -> list[str]:
    """Two epochs at a rate that moves the tiny model."""
    return tiny.words(inputs, output, *("--batch.tokens", "256", "--train.epochs", "2", *more))


def plain(inputs: tiny.Inputs, output: Path, *more: str) -> list[dict[str, Any]]:
    """The run in plain torch."""
    return run_dpo(words(inputs, output, *more), str(inputs.cache), PlainBackend())


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


class Pairs:
    """An engine over a vocabulary of ten: log-probability -log 10 for each token, with a slope."""

    def __call__(self, batch: Any, readout: Any) -> dict[str, torch.Tensor]:
        tokens = torch.full((len(batch.predict),), -math.log(10), requires_grad=True)
        sums = torch.zeros(len(batch.answer_example)).index_add(0, batch.answer, tokens)
        entropy = torch.full_like(tokens, math.log(10)).detach()
        return {"logprobs": sums, "tokens/logprobs": tokens, "tokens/entropy": entropy}


def trainer(*losses: LossEntry, **settings: Any) -> DPOTrainer:
    made = DPOTrainer(DPOConfig(loss=losses, **settings), tokenizer=None)
    made.policy = Pairs()
    return made


def row(prompt: int = 2, chosen: int = 2, rejected: int = 3, ranks: Any = (1.0, 2.0)) -> Any:
    answers = [Answer([5] * chosen), Answer([6] * rejected)]
    return SimpleNamespace(prompt=[1] * prompt, answers=answers, columns={"ranks": list(ranks)})


def test_each_term_is_divided_by_what_it_is_per() -> None:
    made = trainer(LossEntry(name="sigmoid"), LossEntry(name="sft", weight=0.5), reference="none")
    examples = [made.example(row(2, 2, 3)), made.example(row(0, 3, 2))]
    assert str(examples[1].values["chosen"]) == "[[nan, 1.0, 1.0], [nan, nan]]"
    loss = made.loss(pack(examples, [0, 1]))
    assert [(term.per, term.weight) for term in loss.terms] == [("examples", 1.0), ("labels", 0.5)]
    # Sums of log-probabilities: -2 and -3 times log 10; without a prompt -2 and -1 times.
    pairs = sum(math.log1p(math.exp(-0.1 * lead * math.log(10))) for lead in (1, -1))
    expected = pairs / 2 + 0.5 * math.log(10)
    total = weighted_loss(loss, {"examples": 2.0, "labels": 4.0})
    assert total.item() == pytest.approx(expected, abs=1e-6)
    margin, per = loss.metrics["rewards/margins"]
    assert (margin.item(), per) == (pytest.approx(0.0, abs=1e-6), "examples")
    assert loss.metrics["rewards/accuracies"][0].item() == 1.0
    assert loss.metrics["logps/chosen"][0].item() == pytest.approx(-4 * math.log(10))
    assert loss.metrics["nll_loss"][0].item() == pytest.approx(4 * math.log(10))


def test_losses_per_token_compare_means() -> None:
    made = trainer(LossEntry(name="simpo"), beta=2.0, gamma=0.5)
    loss = made.loss(pack([made.example(row(2, 2, 3))], [0]))
    assert loss.terms[0].sum.item() == pytest.approx(math.log1p(math.exp(0.5)), abs=1e-6)


def test_orpo_and_cpo_bring_the_likelihood_of_their_papers() -> None:
    for name in ("orpo", "cpo"):
        loss = trainer(LossEntry(name=name)).loss(pack([row_example(name)], [0]))
        assert [term.per for term in loss.terms] == ["examples", "labels"]


def row_example(name: str) -> Example:
    return trainer(LossEntry(name=name)).example(row())


def test_a_loss_of_ones_own_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def squared(chosen, rejected, config):\n"
    source += "    return (config.beta * (chosen - rejected)).square()\n"
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    made = trainer(LossEntry(name="my_losses:squared"), reference="none", beta=0.5)
    loss = made.loss(pack([made.example(row(2, 2, 3))], [0]))
    assert loss.terms[0].sum.item() == pytest.approx((0.5 * math.log(10)) ** 2, rel=1e-5)
    with pytest.raises(RLHFError, match="nowhere:there does not import: ModuleNotFoundError"):
        trainer(LossEntry(name="nowhere:there"))


def test_the_better_answer_comes_first_whatever_the_row_says_first() -> None:
    example = trainer(LossEntry(name="sigmoid")).example(row(ranks=(2.0, 1.0)))
    assert [list(answer.tokens) for answer in example.answers] == [[6, 6, 6], [5, 5]]


@pytest.mark.parametrize("ranks", [(1.0, 1.0), (1.0, 2.0, 3.0)])
def test_a_row_that_is_no_pair_is_refused(ranks: Any) -> None:
    with pytest.raises(RLHFError) as error:
        trainer(LossEntry(name="sigmoid")).example(row(ranks=ranks))
    assert str(error.value) == (
        "dpo compares two answers of which one is better, but a row has the ranks "
        f"{list(ranks)}: write it as `chosen` and `rejected`"
    )


@pytest.mark.parametrize(("mode", "exact"), [("adapter", True), ("engine", True), ("cache", False)])
def test_it_starts_at_ln_2_with_margin_0(
    mode: str, exact: bool, inputs: tiny.Inputs, tmp_path: Path
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
def curve(inputs: tiny.Inputs, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve in plain torch, one process: what all others are held against."""
    folder = tmp_path_factory.mktemp("plain")
    return plain(inputs, folder / "run", "--dpo.loss", ALL, "--dpo.reference", "engine")


CASES = {
    "one rank, small batches, cache": (1, "0", "192", "cache"),
    "two ranks, stage 2, engine": (2, "2", "192", "engine"),
    "two ranks, stage 3, engine": (2, "3", "1024", "engine"),
    "two ranks, stage 3, cache": (2, "3", "192", "cache"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_curve_does_not_depend_on_the_hardware(
    name: str,
    curve: list[dict[str, Any]],
    inputs: tiny.Inputs,
    one: Ranks,
    two: Ranks,
    tmp_path: Path,
) -> None:
    world, stage, tokens, mode = CASES[name]
    more = ("--deepspeed.stage", stage, "--batch.tokens", tokens, "--dpo.reference", mode)
    sharded = ("--deepspeed.persistence_threshold", "0") if stage == "3" else ()
    arguments = words(inputs, tmp_path / "run", "--dpo.loss", ALL, *more, *sharded)
    cache = str(tmp_path / "cache" if mode == "cache" else inputs.cache)
    metrics = (one if world == 1 else two).run(run_dpo, arguments, cache)[0]
    assert tiny.steps(curve, "loss")[-1] < 0.9 * tiny.steps(curve, "loss")[0]
    for key in ("loss", "rewards/margins", "rewards/chosen", "nll_loss", "entropy"):
        assert tiny.steps(metrics, key) == pytest.approx(
            tiny.steps(curve, key), rel=1e-4, abs=1e-4
        ), key
    assert tiny.steps(metrics, "loss") == pytest.approx(tiny.steps(curve, "loss"), abs=1e-5)
    assert metrics[-1]["eval/loss"] == pytest.approx(curve[-1]["eval/loss"], abs=1e-5)


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_an_adapters_reference_is_right_at_every_stage(
    stage: str, inputs: tiny.Inputs, two: Ranks, tmp_path: Path
) -> None:
    adapter = ("--lora", "2", "--optim.lr", "1e-2")
    expected = plain(inputs, tmp_path / "plain", *adapter)
    sharded = ("--deepspeed.persistence_threshold", "0") if stage == "3" else ()
    more = (*adapter, "--deepspeed.stage", stage, *sharded)
    metrics = two.run(run_dpo, words(inputs, tmp_path / "run", *more), str(inputs.cache))[0]
    assert tiny.steps(expected, "loss")[0] == pytest.approx(LN_2)
    assert tiny.steps(expected, "loss")[-1] < LN_2 - 0.01
    for key in ("loss", "rewards/margins"):
        found = tiny.steps(metrics, key)
        assert found == pytest.approx(tiny.steps(expected, key), rel=1e-4, abs=1e-5), key


MOVING = ("--dpo.reference_every", "2", "--dpo.reference_mix", "0.5")


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_reference_that_moves_is_the_same_anywhere_and_resumes_to_the_last_bit(
    stage: str, inputs: tiny.Inputs, two: Ranks, tmp_path: Path
) -> None:
    expected = plain(inputs, tmp_path / "plain", *MOVING)
    sharded = ("--deepspeed.persistence_threshold", "0") if stage == "3" else ()

    def run(folder: str, *more: str) -> list[dict[str, Any]]:
        options = (*MOVING, "--deepspeed.stage", stage, *sharded, *more)
        return two.run(run_dpo, words(inputs, tmp_path / folder, *options), str(inputs.cache))[0]

    straight = run("straight")
    run("halves", "--train.stop_at", "5")
    halves = run("halves", "--resume")
    found = tiny.steps(straight, "loss")
    assert found == pytest.approx(tiny.steps(expected, "loss"), abs=1e-5)
    for key in ("loss", "grad_norm", "rewards/margins", "logps/rejected"):
        assert tiny.steps(halves, key) == tiny.steps(straight, key), key
    assert halves[-1]["eval/loss"] == straight[-1]["eval/loss"]


def test_the_mix_reaches_the_curve(inputs: tiny.Inputs, tmp_path: Path) -> None:
    every = ("--train.steps", "3", "--dpo.reference_every", "1")
    little = plain(inputs, tmp_path / "little", *every, "--dpo.reference_mix", "0.1")
    whole = plain(inputs, tmp_path / "whole", *every, "--dpo.reference_mix", "1")
    assert tiny.steps(little, "loss") != pytest.approx(tiny.steps(whole, "loss"), abs=1e-4)
    # A reference that is replaced each step is the policy: the next step starts at ln 2.
    assert tiny.steps(whole, "loss") == pytest.approx([LN_2] * 3)
