"""The families in use: the curve does not depend on ranks and stages, and a resumed run is the one
that was not stopped, to the last bit."""

from pathlib import Path

import pytest

from rlhf_devkit import column, short_run
from rlhf_devkit.curves import weights, without_timings
from rlhf_devkit.ranks import Ranks
from rlhf_devkit.tiny import run
from small_families import write_family

STAGE_3 = ("--deepspeed.stage", "3", "--deepspeed.persistence_threshold", "0")
LAYOUTS = {
    0: ("--deepspeed.stage", "0", "--batch.tokens", "2048"),
    3: (*STAGE_3, "--batch.tokens", "256"),
}
"""By the stage of ZeRO."""
CASES = {
    "Qwen3.5": "dpo", "Granite 4": "dpo", "LFM2": "sft", "Gemma 4": "dpo", "GPT-OSS": "sft",
    "DeepSeek V3": "dpo", "Mistral 3": "sft",
}  # fmt: skip
QUICK = ("Qwen3.5", "Gemma 4", "DeepSeek V3")
"""Layers with a state, layers that share keys and values, and experts with latent attention."""
FORMATS = {"sft": "demonstration", "dpo": "preference"}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        (name, (0, 3)) if name in QUICK else pytest.param(name, (0, 3), marks=pytest.mark.matrix)
        for name in CASES
    ]
    + [pytest.param(name, (3, 0), marks=pytest.mark.matrix) for name in CASES],
)
def test_the_curve_does_not_depend_on_the_layout_and_resume_is_exact(
    name: str, stages: tuple[int, int], tmp_path: Path, one: Ranks, two: Ranks
) -> None:
    trainer = CASES[name]
    words = short_run(tmp_path, FORMATS[trainer])
    family = write_family(name, words[words.index("--model") + 1], tmp_path / "family")
    words += ["--model.path", str(family), "--checkpoint.every", "2", "--optim.lr", "3e-4"]
    curves = []
    for ranks, stage in zip((one, two), stages, strict=True):
        output = tmp_path / str(ranks.world)
        own = [*words, *LAYOUTS[stage], "--output", str(output)]
        straight = ranks.run(run, trainer, own, str(tmp_path / "cache"))[0]
        trained = weights(output)
        own += ["--resume", "step-000002"]
        resumed = ranks.run(run, trainer, own, str(tmp_path / "cache"))[0]
        assert without_timings(resumed) == without_timings(straight)
        assert weights(output) == trained
        curves.append(straight)
    alone, apart = curves
    assert column(apart, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(apart, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    assert column(alone, "loss")[-1] != column(alone, "loss")[0]
