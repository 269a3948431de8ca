"""Mixtures of experts in every workflow: the router loss is a term of the loss, the curve does not
depend on ranks, stages and micro-batches, and the export has the family's own layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from rlhf.testing import column, short_run
from rlhf.testing.ranks import Ranks
from rlhf.testing.tiny import run

FORMATS = {
    "sft": "demonstration", "dpo": "preference", "rm": "preference", "kto": "unpaired",
    "kd": "demonstration", "prm": "stepwise",
}  # fmt: skip
STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")


def write_experts(source: Path, folder: Path) -> Path:
    """Write a Mixtral with the tokenizer of `source`."""
    dense = AutoConfig.from_pretrained(source)
    config = MixtralConfig(
        vocab_size=dense.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        router_aux_loss_coef=0.5, pad_token_id=dense.pad_token_id,
        bos_token_id=dense.bos_token_id, eos_token_id=dense.eos_token_id, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    for path in source.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in source.glob("*.jinja"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", FORMATS)
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
