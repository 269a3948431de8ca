"""A model whose config.json ties its head to the embedding although the weights differ: the same at
every stage, on resume, in exports, and as a reference or teacher."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sft_runs
from rlhf.train.exporting import write_model
from rlhf_devkit import column, short_run, tiny
from rlhf_devkit.ranks import Ranks
from sft_runs import Inputs

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
FROZEN_3 = ("--deepspeed.frozen", "3", "--deepspeed.persistence_threshold", "0")


def another_head(folder: Path, seed: int = 5) -> None:
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    torch.manual_seed(seed)
    weights["lm_head.weight"] = torch.randn_like(embedding) * embedding.std()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def model(inputs: Inputs, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(inputs.model, tmp_path / "model"))
    another_head(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("stage", [("--deepspeed.stage", "0"), STAGE_3], ids=["0", "3"])
def test_the_head_is_exported_from_every_stage(
    stage: tuple[str, ...], model: Path, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    more = ("--model", str(model), "--train.steps", "1", "--optim.lr", "1e-12", *stage)
    one.run(sft_runs.run, sft_runs.words(inputs, run, *more), str(inputs.cache))
    out.mkdir()
    write_model(run / "checkpoints" / "step-000001", out)
    for folder in (run / "model", out):
        torch.testing.assert_close(logits(folder), logits(model))
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_a_run_of_stage_0_is_resumed_at_stage_3(
    model: Path, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> list[dict[str, Any]]:
        words = ("--model", str(model), "--train.steps", "4", *more)
        all_words = sft_runs.words(inputs, tmp_path / name, *words)
        return one.run(sft_runs.run, all_words, str(inputs.cache))[0][1]

    straight = run("straight", "--deepspeed.stage", "0")
    run("halves", "--deepspeed.stage", "0", "--train.stop_at", "2")
    halves = run("halves", "--resume", *STAGE_3)
    assert column(halves, "loss") == pytest.approx(column(straight, "loss"), abs=1e-5)


def test_a_sharded_reference_has_the_head_of_the_policy(one: Ranks, tmp_path: Path) -> None:
    words = [*short_run(tmp_path, "preference"), "--train.steps", "1", *FROZEN_3]
    another_head(tmp_path / "model")
    words += ["--dpo.reference", "engine", "--output", str(tmp_path / "run")]
    (metrics,) = one.run(tiny.run, "dpo", words, str(tmp_path / "cache"))
    assert column(metrics, "rewards/margins")[0] == pytest.approx(0, abs=1e-6)


def test_a_sharded_teacher_has_its_head(one: Ranks, tmp_path: Path) -> None:
    words = [*short_run(tmp_path, "demonstration"), "--train.steps", "1"]
    teacher = Path(shutil.copytree(tmp_path / "model", tmp_path / "teacher"))
    another_head(teacher)

    def loss(name: str, *more: str) -> float:
        own = [*words, "--kd.teacher", str(teacher), "--output", str(tmp_path / name), *more]
        (metrics,) = one.run(tiny.run, "kd", own, str(tmp_path / "cache"))
        return column(metrics, "loss")[0]

    assert loss("sharded", *FROZEN_3) == pytest.approx(loss("whole"), abs=1e-6) != 0
