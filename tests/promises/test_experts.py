"""Mixtures of experts in every workflow: the router loss is a term of the loss, the curve does not
depend on ranks, stages and micro-batches, and the export has the family's own layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
)

from expert_models import FORMATS, STACKED, write_experts
from rlhf.commands.main import main
from rlhf.model.exported import exported_model
from rlhf_devkit import column, command, short_run
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run
from small_families import write_family

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sft", "dpo") else pytest.param(name, marks=pytest.mark.matrix)
        for name in FORMATS
    ],
)
def test_the_curve_with_the_router_loss_does_not_depend_on_the_layout(
    name: str, tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    words = short_run(tmp_path, FORMATS[name])
    model = words[words.index("--model") + 1]
    experts = str(write_experts(Path(model), tmp_path / "experts"))
    words += ["--model.path", experts, "--train.steps", "3"]
    words += [f"--{name}.teacher", experts] if name == "kd" else []

    def lines(ranks: Ranks, output: str, *more: str) -> list[dict[str, Any]]:
        arguments = [*words, "--output", str(tmp_path / output), *more]
        return ranks.run(run, name, arguments, str(tmp_path / "cache"))[0]

    alone = lines(one, "alone", "--deepspeed.stage", "0", "--batch.tokens", "2048")
    apart = lines(two, "apart", *STAGE_3, "--batch.tokens", "256")
    curves = [apart]
    if name == "sft":
        axis = ("--deepspeed.stage", "1", "--deepspeed.sequence_parallel", "2")
        curves.append(lines(two, "divided", *axis))
    for curve in curves:
        for key in ("loss", "router_loss"):
            assert column(curve, key) == pytest.approx(column(alone, key), rel=1e-5)
        assert column(curve, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    without = lines(one, "without", "--deepspeed.stage", "0", "--model.router_loss", "0")
    first = alone[0]["loss"] - 0.5 * alone[0]["router_loss"]
    assert without[0]["loss"] == pytest.approx(first, rel=1e-5)
    assert "router_loss" not in without[0]
    names = load_file(tmp_path / "apart/model/model.safetensors").keys()
    assert {item for item in names if "experts" in item} == {
        item for item in load_file(f"{experts}/model.safetensors") if "experts" in item
    }
    if name == "sft":
        AutoModelForCausalLM.from_pretrained(tmp_path / "apart/model")


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_experts_that_muon_trains_follow_the_same_curve_and_resume(
    family: str, tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    words = short_run(tmp_path, "demonstration")
    model = Path(words[words.index("--model") + 1])
    experts = str(write_experts(model, tmp_path / "experts", family))
    words += ["--model.path", experts, "--train.steps", "4", "--optim.name", "muon"]

    def lines(ranks: Ranks, output: str, *more: str) -> list[dict[str, Any]]:
        arguments = [*words, "--output", str(tmp_path / output), *more]
        return ranks.run(run, "sft", arguments, str(tmp_path / "cache"))[0]

    alone = lines(one, "alone", "--deepspeed.stage", "0", "--batch.tokens", "2048")
    layouts = {
        "apart": (*STAGE_3, "--batch.tokens", "256"),
        "offloaded": ("--deepspeed", "zero2_offload", "--batch.tokens", "256"),
        "divided": ("--deepspeed.stage", "1", "--deepspeed.sequence_parallel", "2"),
    }
    curves = {name: lines(two, name, *layout) for name, layout in layouts.items()}
    for name, curve in curves.items():
        for key in ("loss", "router_loss", "grad_norm"):
            assert column(curve, key) == pytest.approx(column(alone, key), rel=1e-4), name
    lines(two, "halves", *layouts["apart"], "--train.stop_at", "2")
    resumed = lines(two, "halves", *layouts["apart"], "--resume")
    assert column(resumed, "loss") == column(curves["apart"], "loss")
    first, last = (
        load_file(f"{at}/model.safetensors") for at in (experts, tmp_path / "apart/model")
    )
    stacked = [name for name in first if "experts" in name]
    assert stacked
    assert not any(torch.equal(first[name], last[name]) for name in stacked)


@pytest.mark.parametrize(
    ("family", "stage"),
    [
        pytest.param("Qwen3-MoE", "2", marks=pytest.mark.matrix),
        ("GPT-OSS", "3"),
        *(
            pytest.param(family, "3", marks=pytest.mark.matrix)
            for family in ("Qwen3-MoE", "DeepSeek V3", "Mixtral", "Granite 4")
        ),
    ],
)
def test_an_adapter_of_experts_follows_the_curve_resumes_and_merges(
    family: str, stage: str, tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    words = short_run(tmp_path, "preference")
    source = Path(words[words.index("--model") + 1])
    if family == "Qwen3-MoE":
        experts = write_experts(source, tmp_path / "experts", "qwen3_moe")
    else:
        experts = write_family(family, source, tmp_path / "experts")
    words += ["--model.path", str(experts), "--train.steps", "4", "--lora.rank", "2"]
    words += ["--lora.targets", "o_proj", "--lora.parameters", STACKED]
    words += ["--dpo.reference", "adapter"]

    def lines(ranks: Ranks, output: str, *more: str) -> list[dict[str, Any]]:
        arguments = [*words, "--output", str(tmp_path / output), *more]
        return ranks.run(run, "dpo", arguments, str(tmp_path / "cache"))[0]

    alone = lines(one, "alone", "--deepspeed.stage", "0", "--batch.tokens", "2048")
    assert column(alone, "rewards/margins")[0] == 0
    layout = STAGE_3 if stage == "3" else ("--deepspeed.stage", stage)
    apart = (*layout, "--batch.tokens", "256", "--model.recompute", "full")
    straight = lines(two, "apart", *apart)
    assert column(straight, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(straight, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    lines(two, "halves", *apart, "--train.stop_at", "2")
    assert column(lines(two, "halves", *apart, "--resume"), "loss") == column(straight, "loss")

    saved = load_file(tmp_path / "apart/model/adapter_model.safetensors")
    trained = [name for name in saved if ".experts." in name and "lora_B" in name]
    assert trained
    assert all(saved[name].any() for name in trained)
    command("merge", str(tmp_path / "apart/model"), str(tmp_path / "merged"))
    assert {
        name: item.shape for name, item in load_file(tmp_path / "merged/model.safetensors").items()
    } == {name: item.shape for name, item in load_file(experts / "model.safetensors").items()}
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        adapted, merged, base = (
            exported_model(folder, "causal", dtype=torch.float32).eval()(tokens).logits
            for folder in (tmp_path / "apart/model", tmp_path / "merged", experts)
        )
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert not torch.allclose(adapted, base, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            ("--lora.parameters", "[experts.up_proj]"),
            "lora.parameters experts.up_proj names no stacked weight of Qwen3MoeForCausalLM; "
            "available: experts.down_proj, experts.gate_up_proj",
        ),
        (
            ("--lora.parameters", STACKED, "--lora.dora", "true"),
            "lora.parameters cannot be combined with lora.dora; remove one of the two",
        ),
        (
            ("--lora.parameters", STACKED, "--lora.dropout", "0.1"),
            "lora.parameters cannot be combined with lora.dropout; remove one of the two",
        ),
        (
            ("--lora.parameters", STACKED, "--model.kernels", "compile"),
            "lora.parameters cannot be combined with model.kernels compile; remove one of the two",
        ),
    ],
    ids=("name", "dora", "dropout", "compile"),
)
def test_invalid_adapters_of_experts_are_refused(
    more: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = short_run(tmp_path, "demonstration")
    source = Path(words[words.index("--model") + 1])
    experts = write_experts(source, tmp_path / "experts", "qwen3_moe")
    words += ["--model.path", str(experts), "--output", str(tmp_path / "run"), *more]
    assert main(["run", "sft", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {text}"


def test_a_model_without_stacked_weights_has_no_adapters_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*short_run(tmp_path, "demonstration"), "--lora.parameters", STACKED]
    assert main(["run", "sft", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: lora.parameters experts.gate_up_proj names no stacked weight of LlamaForCausalLM; "
        "it has none, so remove lora.parameters"
    )
