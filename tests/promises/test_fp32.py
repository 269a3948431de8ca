"""Weights that transformers keeps in fp32 are computed, trained, resumed and exported in fp32 in a
run in bf16, at every ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_devkit import column, short_run
from rlhf_devkit.families import FAMILIES
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run

LAYOUTS = {
    "0": ("--deepspeed.stage", "0"),
    "1": ("--deepspeed.stage", "1", "--batch.tokens", "256"),
    "2": ("--deepspeed.stage", "2"),
    "3": ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0"),
    "offloaded": ("--deepspeed.stage", "3", "--deepspeed.offload_optimizer", "true"),
}


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("DeepSeek V3", ("1", "3")),
        *(
            pytest.param(family, tuple(LAYOUTS), marks=pytest.mark.matrix)
            for family in ("DeepSeek V3", "OLMo Hybrid")
        ),
    ],
)
def test_what_transformers_keeps_in_fp32_is_trained_in_fp32(
    family: str, layouts: tuple[str, ...], tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    words = short_run(tmp_path, "demonstration")
    tokenizer = AutoTokenizer.from_pretrained(words[words.index("--model") + 1])
    config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**options | {"vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "fp32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words += ["--model.path", str(tmp_path / "base"), "--train.steps", "4"]
    words += ["--model.dtype", "bf16", "--optim.lr", "1e-5"]
    base = load_file(tmp_path / "base/model.safetensors")

    def lines(ranks: Ranks, output: str, *more: str) -> list[dict[str, Any]]:
        arguments = [*words, "--output", str(tmp_path / output), *more]
        return ranks.run(run, "sft", arguments, str(tmp_path / "cache"))[0]

    def exported(output: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / output / "model/model.safetensors")

    alone = lines(one, "alone", *LAYOUTS["0"])
    trained = [name for name, it in plain.named_parameters() if it.dtype == torch.float32]
    assert len(trained) == 1
    for layout in layouts:
        more = LAYOUTS[layout]
        curve = lines(two, layout, *more)
        assert column(curve, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
        after = exported(layout)
        assert {key: it.dtype for key, it in after.items()} == {
            key: it.dtype for key, it in base.items()
        }
        for name in trained:
            moves = (after[name] - base[name]).abs()
            # Less than a step of bf16, which an update in bf16 could not take.
            assert 0 < moves.max() < 5e-5 < base[name].abs().max() / 256
            assert torch.allclose(after[name], exported("alone")[name], atol=2e-6, rtol=0)
        buffers = [name for name, _ in plain.named_buffers() if name in base]
        assert all(torch.equal(after[name], base[name]) for name in buffers)
        lines(two, f"{layout}-halves", *more, "--train.stop_at", "2")
        assert column(lines(two, f"{layout}-halves", *more, "--resume"), "loss") == column(
            curve, "loss"
        )
        resumed = exported(f"{layout}-halves")
        assert all(torch.equal(resumed[name], value) for name, value in after.items())
