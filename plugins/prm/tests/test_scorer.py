"""Exported process reward models: the run's probabilities, in plain transformers and in a run after
it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from rlhf.errors import RLHFError
from rlhf_devkit import command, shared, tiny
from rlhf_plugin_prm.scorer import Scorer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a tiny run."""
    return tiny.short_run(tmp_path_factory.mktemp("prm"), "stepwise")


STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
CASES = {
    "head": (1, ("--deepspeed.stage", "0")),
    "head, stage 3, LoRA": (2, (*STAGE_3, "--lora.rank", "4")),
    "token, stage 3": (2, (*STAGE_3, "--prm.formulation", "token")),
    "token, placeholder, LoRA": (
        1,
        ("--prm.formulation", "token", "--prm.placeholder", "<step>", "--lora.rank", "4"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_scorer_gives_the_probabilities_of_the_last_evaluation(
    name: str, words: list[str], tmp_path: Path
) -> None:
    world, more = CASES[name]
    given = [*words, "--output", str(tmp_path / "run"), *more]
    metrics = shared(world).run(tiny.run, "prm", given, str(tmp_path / "cache"))[0][-1]
    held_out = read_rows(words[words.index("--data.eval") + 1])
    for measure, value in measured(Scorer(tmp_path / "run" / "model"), held_out).items():
        assert metrics[f"eval/{measure}"] == pytest.approx(value, abs=1e-5), measure


def measured(scorer: Scorer, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The measures of an evaluation, from the scorer's probabilities."""
    scored = [scorer.probabilities(row["prompt"], row["completions"]) for row in rows]
    labels = [label for row in rows for label in row["labels"]]
    found = [probability for row in scored for probability in row]
    said = [probability > 0.5 for probability in found]
    pairs = list(zip(found, labels, strict=True))
    firsts = [
        [*row["labels"], False].index(False)
        == [*(p > 0.5 for p in probabilities), False].index(False)
        for row, probabilities in zip(rows, scored, strict=True)
    ]
    hits = sum(not one and not other for one, other in zip(said, labels, strict=True))
    return {
        "loss": mean(-math.log(p if label else 1 - p) for p, label in pairs),
        "accuracy": mean(one == other for one, other in zip(said, labels, strict=True)),
        "first_error_accuracy": mean(firsts),
        "f1_wrong": 2 * hits / (said.count(False) + labels.count(False)),
    }


def mean(values: Any) -> float:
    return float(Tensor([float(value) for value in values]).mean())


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_labels_that_are_cut_off_are_counted(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = ["--data.max_tokens", "40", "--data.too_long", "cut", "--train.stop_at", "1"]
    given = [*words, "--output", str(tmp_path / "run"), *cut]
    tiny.run("prm", given, str(tmp_path / "cache"), True)
    assert re.search(r"; [1-9]\d* labels cut off, ", capsys.readouterr().out)


STEPS = ["2 + 2 = 4", "4 + 3 = 8", "The answer is 8."]


@pytest.mark.parametrize("side", ["left", "right"])
def test_plain_transformers_judges_padded_rows_alike(
    side: str, words: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "model"
    given = [*words, "--output", str(folder.parent)]
    shared(1).run(tiny.run, "prm", given, str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "wrong", 1: "right"}
    (end,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    texts = ["What is 2 + 2 + 3?" + "\n".join([*steps, ""]) for steps in (STEPS, STEPS[:1])]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        odds = model(**inputs).logits.diff(dim=-1).squeeze(-1)
    scorer = Scorer(folder)
    for row, (ids, steps) in enumerate(zip(inputs["input_ids"], (STEPS, STEPS[:1]), strict=True)):
        expected = scorer.probabilities("What is 2 + 2 + 3?", steps)
        assert odds[row][ids == end].sigmoid().tolist() == pytest.approx(expected, abs=1e-5)


def test_training_continues_from_the_probabilities_of_an_exported_model(
    words: list[str], tmp_path: Path
) -> None:
    folder, cache = tmp_path / "first" / "model", str(tmp_path / "cache")
    first = [*words, "--output", str(folder.parent)]
    before = shared(1).run(tiny.run, "prm", first, cache)[0][-1]
    more = ["--train.eval_at_start", "true", "--output", str(tmp_path / "second")]
    second = ["--model", str(folder), *words[2:], *more]
    metrics = shared(1).run(tiny.run, "prm", second, cache)[0]
    at_start = next(line for line in metrics if "eval/loss" in line)
    assert at_start["step"] == 0
    for name, value in before.items():
        if name.startswith("eval/"):
            assert at_start[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("formulation", ["head", "token"])
def test_a_merged_adapter_gives_the_scores_of_the_adapter(
    formulation: str, words: list[str], tmp_path: Path
) -> None:
    given = [*words, "--lora.rank", "4", "--prm.formulation", formulation]
    given += ["--prm.separator", "<step>", "--output", str(tmp_path / "run")]
    shared(1).run(tiny.run, "prm", given, str(tmp_path / "cache"))
    command("merge", str(tmp_path / "run"), str(tmp_path / "merged"))
    one, other = Scorer(tmp_path / "run" / "model"), Scorer(tmp_path / "merged")
    expected = one.probabilities("What is 2 + 2 + 3?", STEPS)
    found = other.probabilities("What is 2 + 2 + 3?", STEPS)
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_models_own_dropout_is_off(words: list[str], tmp_path: Path) -> None:
    source = Path(words[1])
    model = tiny.make_model(tmp_path / "model")
    settings = AutoConfig.from_pretrained(source, attention_dropout=0.5)
    settings.save_pretrained(model)
    curves = [
        [
            moment.loss
            for moment in tiny.first_steps(
                "prm",
                ["--model", str(path), *words[2:], "--output", str(tmp_path / "unused")],
                str(tmp_path / "cache"),
                num_steps=2,
            )
        ]
        for path in (source, model)
    ]
    assert curves[0] == curves[1]


def test_a_folder_without_step_scores_is_refused(words: list[str], tmp_path: Path) -> None:
    for folder in (words[words.index("--model") + 1], str(tmp_path / "gone")):
        with pytest.raises(RLHFError) as error:
            Scorer(folder)
        assert str(error.value) == (
            f"{folder} has no config.json of a process reward model; pass the model/ folder of a "
            "run of `rlhf run prm`"
        )
