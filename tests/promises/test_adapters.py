"""DoRA and modules that are trained whole beside an adapter: the curve does not depend on the
hardware, resume is exact, and the exported and merged models are the one that was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import sft_runs
from rlhf.commands.main import main
from rlhf.model.exported import exported_model
from rlhf.plugin import LORA_VARIANTS, READ_BASE
from rlhf_devkit import column, command, short_run, tiny
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.ranks import Ranks
from rlhf_plugin_deepspeed.capabilities import stages_for
from sft_runs import Inputs

ADAPTERS = {name: (f"--lora.{name}", "true") for name in LORA_VARIANTS} | {
    "tied embedding": ("--lora.modules_to_save", "[embed_tokens]"),
    "head and norms": ("--lora.modules_to_save", "[lm_head, input_layernorm]"),
    "dora and embedding": ("--lora.dora", "true", "--lora.modules_to_save", "[embed_tokens]"),
    "on the embedding": ("--lora.targets", "[embed_tokens, q_proj]"),
    "half frozen": ("--model.freeze", '["*lora_A*"]'),
    "dora on the embedding": ("--lora.targets", "[embed_tokens, q_proj]", "--lora.dora", "true"),
}
QUICK = [("tied embedding", 3), ("dora and embedding", 2), ("on the embedding", 3)]
MERGED = ("dora and embedding", "on the embedding", "half frozen")
heavy = pytest.mark.matrix
STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
LENGTH = ("--train.steps", "6", "--checkpoint.every", "3", "--optim.schedule", "cosine")


@pytest.fixture(scope="module")
def untied(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tests with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    for file in inputs.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = LlamaConfig.from_pretrained(inputs.model, tie_word_embeddings=False)
    torch.manual_seed(2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def words(name: str, inputs: Inputs, untied: Path, output: Path, *more: str) -> list[str]:
    model = ("--model", str(untied)) if "head" in name else ()
    own = ("--lora.rank", "4", *ADAPTERS[name], *model)
    return sft_runs.words(inputs, output, *own, *LENGTH, *more)


def cases() -> list[Any]:
    stages: dict[str, tuple[int, ...]] = dict.fromkeys(READ_BASE, (1, 2))
    stages |= {"dora and embedding": (2,), "dora on the embedding": (2,)}
    every = [(name, stage) for name in ADAPTERS for stage in stages.get(name, (2, 3))]
    return [case if case in QUICK else pytest.param(*case, marks=heavy) for case in every]


@pytest.mark.parametrize(("name", "stage"), cases())
def test_the_curve_is_that_of_plain_torch_and_resume_is_exact(
    name: str, stage: int, inputs: Inputs, untied: Path, two: Ranks, tmp_path: Path
) -> None:
    chosen = STAGE_3 if stage == 3 else ("--deepspeed.stage", str(stage))

    def run(folder: str, *more: str) -> list[dict[str, float]]:
        all_words = words(name, inputs, untied, tmp_path / folder, *chosen, *more)
        return two.run(sft_runs.run, all_words, str(inputs.cache))[0][1]

    plain_words = words(name, inputs, untied, tmp_path / "plain")
    _, plain = sft_runs.run(plain_words, str(inputs.cache), backend=PlainBackend())
    straight = run("straight")
    assert column(straight, "loss") == pytest.approx(column(plain, "loss"), abs=1e-5)
    assert column(straight, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-4)
    assert straight[-1]["eval/loss"] < straight[0]["loss"]
    run("halves", "--train.stop_at", "3")
    halves = run("halves", "--resume")
    assert column(halves, "loss") == column(straight, "loss")
    file = "model/adapter_model.safetensors"
    saved, again = (load_file(tmp_path / folder / file) for folder in ("straight", "halves"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key], again[key]) for key in saved)


@pytest.mark.parametrize(
    "name",
    [name if name in MERGED else pytest.param(name, marks=heavy) for name in ADAPTERS],
)
def test_the_exported_and_the_merged_model_are_the_adapted_one(
    name: str, inputs: Inputs, untied: Path, one: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    own = words(name, inputs, untied, run, "--deepspeed.stage", "2")
    ((_, metrics),) = one.run(sft_runs.run, own, str(inputs.cache))
    command("export", str(run / "checkpoints" / "step-000006"), str(tmp_path / "exported"))
    command("merge", str(run / "model"), str(tmp_path / "merged"))
    file = "adapter_model.safetensors"
    assert (tmp_path / "exported" / file).read_bytes() == (run / "model" / file).read_bytes()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        adapted, merged, base = (
            exported_model(folder, "causal", dtype=torch.float32).eval()(tokens).logits
            for folder in (
                run / "model",
                tmp_path / "merged",
                untied if "head" in name else inputs.model,
            )
        )
    assert torch.allclose(adapted, merged, atol=1e-4)
    assert (adapted - base).abs().max() > 0.05
    # The merged model begins at the loss at which the run ended.
    again = sft_runs.words(inputs, tmp_path / "again", "--train.steps", "1")
    again += ["--model", str(tmp_path / "merged"), "--train.eval_at_start", "true"]
    ((_, after),) = one.run(sft_runs.run, again, str(inputs.cache))
    first = next(row["eval/loss"] for row in after if "eval/loss" in row)
    assert first == pytest.approx(metrics[-1]["eval/loss"], abs=1e-5)
    card = (run / "model" / "README.md").read_text()
    needs_merge = "first merge the adapter with `rlhf merge MODEL MERGED`" in card
    assert needs_merge == (name not in ("rslora", "on the embedding", "half frozen"))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=heavy), 3])
def test_the_reference_of_a_preference_loss_has_the_first_values_of_modules_that_are_trained_whole(
    stage: int, two: Ranks, tmp_path: Path
) -> None:
    def run(mode: str) -> list[Any]:
        more = ("--dpo.reference", mode, "--lora.modules_to_save", "[embed_tokens]")
        more += ("--lora.dora", str(stage == 2).lower(), "--output", str(tmp_path / mode))
        all_words = [*short_run(tmp_path, "preference"), *more]
        all_words += STAGE_3 if stage == 3 else ("--deepspeed.stage", str(stage))
        return two.run(tiny.run, "dpo", all_words, str(tmp_path / "cache"))[0]

    adapter, engine = run("adapter"), run("engine")
    assert column(adapter, "rewards/margins")[0] == 0
    assert column(adapter, "loss") == pytest.approx(column(engine, "loss"), abs=1e-6)
    assert column(adapter, "loss")[-1] != column(adapter, "loss")[0]


def test_dora_is_refused_at_stage_3_before_anything_loads(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = sft_runs.words(inputs, tmp_path / "run", "--lora.dora", "true")
    code = main(["run", "sft", *own, "--deepspeed.stage", "3"])
    assert code == 2
    assert capsys.readouterr().err == (
        "error: lora.dora works only at ZeRO stages 0 to 2, not at stage 3; use the preset "
        "zero2, which shards what the adapter trains\n"
    )


def test_stage_auto_chooses_among_the_stages_of_dora() -> None:
    assert stages_for(["lora.dora"]) == (0, 1, 2)
