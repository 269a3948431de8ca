"""Every pair of workflow, layout, what is trained, and dtype: a run starts, saves, resumes to the
last bit, exports, and in fp32 has the curve of plain torch."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from expert_models import FORMATS, STACKED, write_experts
from rlhf_devkit import short_run
from rlhf_devkit.curves import Metrics, same_curve, weights, without_timings
from rlhf_devkit.ranks import shared
from rlhf_devkit.tiny import make_model, run
from rlhf_plugin_deepspeed import nvme, plugin
from small_families import write_family

LAYOUTS = {
    "ddp": ("--deepspeed", "ddp"),
    "zero1": ("--deepspeed", "zero1"),
    "zero2": ("--deepspeed", "zero2"),
    "zero3": ("--deepspeed", "zero3", "--deepspeed.persistence_threshold", "0"),
    "zero2_offload": ("--deepspeed", "zero2_offload"),
    "zero3_offload": ("--deepspeed", "zero3_offload"),
    "part on the CPU": ("--deepspeed", "zero3_offload", "--deepspeed.offload_ratio", "0.5"),
    "second copy": ("--deepspeed", "zero3", "--deepspeed.hpz_partition_size", "2"),
    "nvme": (
        *("--deepspeed", "zero3_offload", "--deepspeed.frozen", "offload"),
        *("--deepspeed.nvme_path", "{disk}"),
    ),
} | {
    f"{axis}, {preset}": ("--deepspeed", preset, f"--deepspeed.{axis}_parallel", "2")
    for axis, presets in {
        "sequence": ("ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
        "tensor": ("ddp", "zero1", "zero2", "zero2_offload"),
    }.items()
    for preset in presets
}
OPTIMIZERS = [kind.name for kind in plugin.optimizers if kind.name != "adamw"]
TRAINED = {
    "all": ("--model.router_loss", "null"),
    "lora": ("--lora", "2"),
    "experts": ("--model.router_loss", "0.5"),
    "lora of experts": ("--lora", "2", "--lora.targets", "q_proj", "--lora.parameters", STACKED),
    "hybrid": (),
    "lora of a hybrid": ("--lora", "2"),
} | {name: ("--optim.name", name, "--optim.lr", "3e-4") for name in OPTIMIZERS}
DTYPES = ("fp32", "bf16")
Case = tuple[str, str, str, str]


def cases() -> list[Case]:
    """A few cases that have all pairs of two choices: each is the one with most pairs that none
    before it has."""

    def pairs(case: Case) -> set[tuple[str, str]]:
        return set(itertools.combinations(case, 2))

    def possible() -> Iterator[Case]:
        for case in itertools.product(FORMATS, LAYOUTS, TRAINED, DTYPES):
            # Refused: only the layers of dense models can be divided, and no state of a layer.
            _, layout, trained, _ = case
            tensor = "tensor" in layout and ("experts" in trained or "hybrid" in trained)
            if not (tensor or ("sequence" in layout and "hybrid" in trained)):
                yield case

    chosen: list[Case] = []
    missing = set[tuple[str, str]]().union(*map(pairs, possible()))
    while missing:
        chosen.append(max(possible(), key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "layout", "trained", "dtype"), cases())
def test_a_run_saves_resumes_and_exports(
    name: str, layout: str, trained: str, dtype: str, tmp_path: Path
) -> None:
    if layout == "nvme" and re.fullmatch(nvme.ELSEWHERE, nvme.file_system(tmp_path)):
        pytest.skip("temporary files are not on a local disk")
    words = short_run(tmp_path, FORMATS[name])
    words += ["--model.dtype", dtype, "--train.steps", "2", "--checkpoint.every", "1"]
    words += ["--train.eval_every", "1", "--optim.clip", "0.05", *TRAINED[trained]]
    model = Path(words[words.index("--model") + 1])
    if "experts" in trained:
        family = "mixtral" if trained == "experts" else "qwen3_moe"
        words += ["--model.path", str(write_experts(model, tmp_path / "experts", family))]
    if "hybrid" in trained:
        words += ["--model.path", str(write_family("Qwen3.5", model, tmp_path / "hybrid"))]
    if name == "kd":
        teacher = make_model(tmp_path / "teacher", seed=1)
        if "hybrid" in trained:
            # transformers reads the same tokenizer otherwise for this family.
            teacher = write_family("Qwen3.5", model, tmp_path / "hybrid teacher", seed=1)
        words += ["--kd.teacher", str(teacher)]

    divided = [word.format(disk=tmp_path / "disk") for word in LAYOUTS[layout]]

    def lines(output: str, *more: str, plain: bool = False) -> Metrics:
        arguments = [*words, "--output", str(tmp_path / output), *more]
        ranks = shared(1 if plain else 2)
        return ranks.run(run, name, arguments, str(tmp_path / "cache"), plain)[0]

    straight = lines("straight", *divided)
    lines("stopped", *divided, "--train.stop_at", "1")
    resumed = lines("stopped", *divided, "--resume")
    assert without_timings(resumed) == without_timings(straight)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")
    if dtype == "fp32" and trained not in OPTIMIZERS:
        same_curve(straight, lines("plain", plain=True))
