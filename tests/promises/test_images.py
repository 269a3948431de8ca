"""Rows with images beside rows without them: the curve does not depend on which ranks have some."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import rlhf_demo
from image_runs import TRAINER, write_run
from rlhf.errors import RLHFError
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf_devkit import column
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run, write_rows

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
CASES = {
    "Qwen2.5-VL": (
        "--model.train", "[language, projector, vision]", "--optim.part_lr", "{vision: 1e-2}",
    ),
    "LLaVA": ("--model.train", "[projector, vision]"),
    "Gemma 3": ("--model.recompute", "full"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trainer of rows that are examples."""
    file = tmp_path_factory.mktemp("trainer") / "pictured.py"
    file.write_text(TRAINER)
    return f"{file}:Pictured"


@pytest.mark.parametrize(
    "name",
    ["Qwen2.5-VL", *(pytest.param(it, marks=pytest.mark.matrix) for it in ("LLaVA", "Gemma 3"))],
)
def test_ranks_without_images_wait_for_those_with_images(
    name: str, tmp_path: Path, trainer: str, one: Ranks, two: Ranks
) -> None:
    words, curves = [*write_run(name, tmp_path), *CASES[name]], []
    for ranks, own in (
        (one, ("--batch.tokens", "2048")),
        (two, (*STAGE_3, "--batch.tokens", "96")),
    ):
        output = ["--output", str(tmp_path / str(ranks.world))]
        curves.append(ranks.run(run, trainer, [*words, *own, *output], str(tmp_path / "cache"))[0])
    alone, apart = curves
    assert column(apart, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(apart, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    assert column(alone, "loss")[-1] != column(alone, "loss")[0]


def printed(trainer: str, words: list[str], cache: str) -> str:
    """Return what a run prints."""
    with redirect_stdout(StringIO()) as output:
        run(trainer, words, cache)
    return output.getvalue()


def test_the_parts_that_are_trained_are_printed_with_their_own_rates(
    tmp_path: Path, trainer: str, one: Ranks
) -> None:
    words = [
        *write_run("LLaVA", tmp_path), "--optim.part_lr", "{projector: 1e-5}",
        "--batch.tokens", "2048", "--output", str(tmp_path / "run"),
    ]  # fmt: skip
    (output,) = one.run(printed, trainer, words, str(tmp_path / "cache"))
    assert "images     trained: language and projector at 1e-05; frozen: vision\n" in output


def test_what_cannot_be_done_with_images_is_said_in_one_line(tmp_path: Path, trainer: str) -> None:
    words = [*write_run("LLaVA", tmp_path), "--output", str(tmp_path / "run")]

    def refusal(*more: str) -> str:
        with pytest.raises(RLHFError) as error:
            prepare_data(read_config(trainer, overrides=[*words, *more]))
        return str(error.value)

    server = ("--rollouts.vllm.url", "http://127.0.0.1:9")
    assert refusal("--train.samples", "1", "--rollouts", "vllm", *server) == (
        "data.eval has images, which rollouts 'vllm' of rlhf-rollout-vllm 0.1.0 does not read; set "
        "rollouts.engine to embedded"
    )


def test_parts_that_only_images_reach_need_images(tmp_path: Path, trainer: str, one: Ranks) -> None:
    words = [*write_run("LLaVA", tmp_path), "--output", str(tmp_path / "run")]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "rows.jsonl", [row | {"inputs": {}} for row in rows[1:4]])
    write_rows(tmp_path / "pictures.jsonl", rows)
    more = ["--model.train", "[vision]", "--batch.size", "1"]
    pictures = ["--data.eval", str(tmp_path / "pictures.jsonl")]
    for own in (more, [*more, *pictures]):
        (error,) = one.errors(run, trainer, [*words, *own], str(tmp_path / "cache"))
        assert error == "model.train has no effect on data without images; remove it"


def test_a_teacher_that_reads_text_only_is_refused(tmp_path: Path, one: Ranks) -> None:
    words = [*write_run("LLaVA", tmp_path), "--output", str(tmp_path / "run")]
    base = str(rlhf_demo.base_model_folder())
    load = f'self.teacher = run.load("teacher", model=ModelConfig(path={base!r}), trained=False)'
    text = TRAINER.replace('self.reference = run.reference("cache")', load)
    file = tmp_path / "taught.py"
    file.write_text("from rlhf.plugin import ModelConfig\n" + text)
    (error,) = one.errors(run, f"{file}:Pictured", words, str(tmp_path / "cache"))
    assert error == (
        f"teacher: ModelConfig.path {base} reads text only, and the data have images; choose a "
        "model that reads images"
    )


def test_a_part_that_reads_no_images_is_refused(tmp_path: Path, trainer: str, one: Ranks) -> None:
    words = [*write_run("Qwen3.5", tmp_path), "--output", str(tmp_path / "run")]
    more = [*words, "--model.part", "text"]
    (error,) = one.errors(run, trainer, more, str(tmp_path / "cache"))
    assert error == (
        "model.part text leaves out what reads images, and the data have images; remove model.part"
    )
