"""Layers divided over two or four ranks (`deepspeed.tensor_parallel`): the curve of one rank for
all workflows and families, and checkpoints and exports that do not tell the layouts apart."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlhf.commands.main import main
from rlhf.train.exporting import write_model
from rlhf_devkit import column, make_model, short_run
from rlhf_devkit.curves import same_curve
from rlhf_devkit.ranks import Ranks, ranks_fixture
from rlhf_devkit.tiny import run

TENSOR = ("--deepspeed.tensor_parallel", "2")
STEPS = ("--train.steps", "3", "--optim.clip", "0.5")
WORKFLOWS = {
    "sft": "demonstration",
    "dpo": "preference",
    "rm": "preference",
    "kto": "unpaired",
    "prm": "stepwise",
    "kd": "demonstration",
}
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": BIASES,
    "Qwen3": {"head_dim": 8},
    "Gemma3Text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Mistral": {"head_dim": 8},
    "Cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Granite": {},
    "Olmo": {},
    "SmolLM3": {},
    "Starcoder2": {"embedding_dropout": 0.0, "residual_dropout": 0.0},
}


def words_of(folder: Path, trainer: str, *more: str) -> list[str]:
    words = short_run(folder, WORKFLOWS[trainer])
    if trainer == "kd":
        words += ["--kd.teacher", str(make_model(folder / "teacher", seed=1))]
    return [*words, *STEPS, *more]


def become(folder: Path, family: str, **more: int) -> None:
    """Replace the model in `folder` by a tiny random one of another family, whose norms and biases
    are no ones and zeros."""
    old = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **{name: old.get(name) for name in kept},
    }
    known = FAMILIES | MORE_FAMILIES
    config = getattr(transformers, f"{family}Config")(**(sizes | known.get(family, {}) | more))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def compare(
    one: Ranks, many: Ranks, folder: Path, trainer: str, words: list[str], *more: str
) -> None:
    """Run on one rank in plain torch, and on `many` with the words `more` too; compare curves and
    exported weights."""
    cache = str(folder / "cache")
    single = [*words, "--output", str(folder / "one")]
    axis = [*words, *more, *TENSOR, "--output", str(folder / "many")]
    ((expected),) = one.run(run, trainer, single, cache, True)
    for metrics in many.run(run, trainer, axis, cache):
        same_curve(metrics, expected)
    assert json.loads((folder / "many" / "plan.json").read_text())["policy"]["tensor"] == 2
    same_weights(folder / "many", folder / "one")


def same_weights(run: Path, other: Path) -> None:
    ours, others = (load_weights(folder / "model") for folder in (run, other))
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        # AdamW turns rounding errors of tiny gradients into steps.
        torch.testing.assert_close(value, others[name], rtol=1e-3, atol=2e-3, msg=name)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: value for path in files for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in MORE_FAMILIES)]
)
def test_a_family_divided_over_two_ranks_follows_the_curve_of_one(
    family: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    words = words_of(tmp_path, "sft")
    become(tmp_path / "model", family)
    compare(one, two, tmp_path, "sft", words, "--deepspeed.stage", "2")


def combinations() -> Iterator[object]:
    """All workflows at all stages; each readout and each stage at least once by default."""
    for number, trainer in enumerate(WORKFLOWS):
        for stage in range(3):
            quick = stage == number % 3 and trainer not in ("kto", "prm")
            marks = [] if quick else [pytest.mark.matrix]
            yield pytest.param(trainer, stage, marks=marks)


@pytest.mark.parametrize(("trainer", "stage"), combinations())
def test_a_workflow_under_a_tensor_axis_follows_the_curve_of_one_rank(
    trainer: str, stage: int, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    words = words_of(tmp_path, trainer)
    compare(one, two, tmp_path, trainer, words, "--deepspeed.stage", str(stage))


OPTIONS = {
    "no divided layer that is trained": (
        "sft",
        ("--model.freeze", "model.layers.*"),
        ("--deepspeed.stage", "0"),
    ),
    "LoRA": ("sft", ("--lora.rank", "4"), ()),
    "LoRA and a divided layer that is trained whole": (
        "sft",
        ("--lora.rank", "4", "--lora.modules_to_save", "[o_proj, up_proj]"),
        (),
    ),
    "LoRA and a reference by its adapter": ("dpo", ("--lora.rank", "4"), ()),
    "a live reference": ("dpo", ("--dpo.reference", "engine"), ()),
    "a reference that moves": ("dpo", ("--dpo.reference_every", "2"), ()),
    "a cached reference": ("dpo", ("--dpo.reference", "cache"), ()),
    "recomputation": ("sft", (), ("--model.recompute", "full")),
    "recomputed products": ("sft", (), ("--model.recompute", "selective")),
    "the norm by DeepSpeed itself": (
        "sft",
        (),
        ("--deepspeed.patches", "correctness", "--deepspeed.stage", "2"),
    ),
    "the optimizer on the CPU": ("sft", (), ("--deepspeed.preset", "zero2_offload")),
    "micro-batches": ("sft", (), ("--batch.tokens", "256", "--deepspeed.stage", "2")),
    "answers of its own": (
        "kd",
        ("--kd.on_policy", "1", "--kd.max_new_tokens", "8", "--batch.tokens", "128"),
        (),
    ),
}


MORE_OPTIONS = (
    "LoRA", "LoRA and a reference by its adapter", "a live reference", "a cached reference",
    "recomputed products", "the optimizer on the CPU",
)  # fmt: skip
"""What the others, and the workflow `dpo` with its defaults, prove too; and a slow one."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.matrix) if name in MORE_OPTIONS else name
        for name in OPTIONS
    ],
)
def test_the_curve_under_a_tensor_axis_is_the_same_with_other_settings(
    name: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    trainer, both, more = OPTIONS[name]
    compare(one, two, tmp_path, trainer, words_of(tmp_path, trainer, *both), *more)


@pytest.mark.parametrize("stage", [pytest.param("0", marks=pytest.mark.matrix), "2"])
def test_muon_updates_whole_matrices_of_divided_layers(
    stage: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    words = words_of(tmp_path, "sft", "--optim.name", "muon", "--deepspeed.stage", stage)
    cache = str(tmp_path / "cache")
    ((expected),) = one.run(run, "sft", [*words, "--output", str(tmp_path / "one")], cache)
    for metrics in two.run(run, "sft", [*words, *TENSOR, "--output", str(tmp_path / "two")], cache):
        same_curve(metrics, expected)
    same_weights(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("stage", ["0", pytest.param("2", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_in_bf16_the_gradient_is_clipped_by_the_norm_over_both_axes(
    states: str, stage: str, one: Ranks, two: Ranks, tmp_path: Path
) -> None:
    words = words_of(tmp_path, "sft", "--model.dtype", "bf16", "--optim.states", states)
    words += ["--deepspeed.stage", stage]
    cache = str(tmp_path / "cache")
    ((expected),) = one.run(run, "sft", [*words, "--output", str(tmp_path / "one")], cache)
    metrics, other = two.run(
        run, "sft", [*words, *TENSOR, "--output", str(tmp_path / "two")], cache
    )
    assert metrics == other
    for name, tolerance in (("loss", 1e-2), ("grad_norm", 3e-2)):
        assert column(metrics, name) == pytest.approx(column(expected, name), rel=tolerance)


four = ranks_fixture(4)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("trainer", "stage"), [(name, number % 3) for number, name in enumerate(WORKFLOWS)]
)
def test_two_by_two_ranks_follow_the_curve_of_one(
    trainer: str, stage: int, one: Ranks, four: Ranks, tmp_path: Path
) -> None:
    words = words_of(tmp_path, trainer)
    compare(one, four, tmp_path, trainer, words, "--deepspeed.stage", str(stage))


MOVES = {
    "two parts to one rank": (("two", (*TENSOR, "--deepspeed.stage", "1")), ("one", ())),
    "one rank to two parts": (("one", ()), ("two", (*TENSOR, "--deepspeed.stage", "2"))),
    "two parts to two rows": (
        ("two", (*TENSOR, "--deepspeed.stage", "0")),
        ("two", ("--deepspeed.stage", "2")),
    ),
    "two by two to two parts": (
        ("four", (*TENSOR, "--deepspeed.stage", "2")),
        ("two", (*TENSOR, "--deepspeed.stage", "0")),
    ),
    "two rows to two by two": (
        ("two", ("--deepspeed.stage", "1")),
        ("four", (*TENSOR, "--deepspeed.stage", "0")),
    ),
}


TRAINED = {
    "all weights": ("sft", ()),
    "LoRA": ("sft", ("--lora.rank", "4")),
    **{trainer: (trainer, ()) for trainer in WORKFLOWS if trainer != "sft"},
}


QUICK_MOVES = (
    *((move, "all weights") for move in MOVES if "by" not in move),
    ("two parts to two rows", "LoRA"),
)
ALL_MOVES = (
    *((move, trained) for trained in ("all weights", "LoRA") for move in MOVES),
    *(("two parts to two rows", trainer) for trainer in WORKFLOWS if trainer != "sft"),
)


@pytest.mark.parametrize(
    ("move", "trained"),
    [
        case if case in QUICK_MOVES else pytest.param(*case, marks=pytest.mark.matrix)
        for case in ALL_MOVES
    ],
)
def test_a_run_continues_at_another_tensor_size(
    move: str, trained: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trainer, settings = TRAINED[trained]
    words = words_of(tmp_path, trainer, "--train.steps", "4", "--checkpoint.every", "2", *settings)
    cache, whole = str(tmp_path / "cache"), tmp_path / "whole"
    one: Ranks = request.getfixturevalue("one")
    ((expected),) = one.run(run, trainer, [*words, "--output", str(whole)], cache, True)
    moved = ["--output", str(tmp_path / "moved")]
    halves = ("--train.stop_at", "2"), ("--resume",)
    for (place, layout), more in zip(MOVES[move], halves, strict=True):
        ranks: Ranks = request.getfixturevalue(place)
        metrics = ranks.run(run, trainer, [*words, *moved, *layout, *more], cache)[0]
    same_curve(metrics, expected)
    same_weights(tmp_path / "moved", whole)
    # A checkpoint is exported without the ranks that wrote it.
    last = tmp_path / "moved" / "checkpoints" / "step-000004"
    exported = tmp_path / "from checkpoint" / "model"
    exported.mkdir(parents=True)
    write_model(last, exported)
    same_weights(exported.parent, tmp_path / "moved")


def test_a_teacher_that_cannot_be_divided_is_whole(one: Ranks, two: Ranks, tmp_path: Path) -> None:
    words = words_of(tmp_path, "kd")
    become(tmp_path / "teacher", "Llama", num_key_value_heads=1)
    compare(one, two, tmp_path, "kd", words)
    plans = json.loads((tmp_path / "many" / "plan.json").read_text())
    assert (plans["policy"]["tensor"], plans["teacher"]["tensor"]) == (2, 1)


REFUSED = {
    "a size that does not divide": (
        "Qwen3",
        {"num_attention_heads": 8, "num_key_value_heads": 4},
        "8",
        "deepspeed.tensor_parallel is 8, which does not divide the heads and the feed-forward "
        "layers of {model}; set it to 1 or 2 or 4",
    ),
    "one key-value head": (
        "Llama",
        {"num_key_value_heads": 1},
        "2",
        "deepspeed.tensor_parallel is 2, but the layers of {model} cannot be divided: 4 attention "
        "and 1 key-value heads and a feed-forward width of 64 have no common divisor but 1; set "
        "deepspeed.stage to 3 instead",
    ),
    "a mixture of experts": (
        "Mixtral",
        {},
        "2",
        "deepspeed.tensor_parallel is 2, but the layers of {model} cannot be divided: mixtral is "
        "not among the families in docs/backends.md; set deepspeed.stage to 3 instead",
    ),
    "ranks that it does not divide": (
        "Llama",
        {},
        "3",
        "deepspeed.tensor_parallel is 3, which does not divide the number of ranks, 8; set it to "
        "1 or 2 or 4 or 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_size_is_refused_before_anything_loads(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, more, size, text = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    words = words_of(tmp_path, "sft", "--deepspeed.tensor_parallel", size)
    become(tmp_path / "model", family, **more)
    (tmp_path / "model" / "model.safetensors").unlink()
    words += ["--model", "./model", "--gpus", "8", "--gpu-memory", "1"]
    assert main(["plan", "sft", *words]) == 2
    assert text.format(model="./model") in capsys.readouterr().err


def test_a_model_that_also_reads_images_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(tmp_path, "sft", "--deepspeed.tensor_parallel", "2")
    text = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    # Its text model alone is of a family that can be divided.
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(tmp_path / "model")
    assert main(["plan", "sft", *words, "--gpus", "2", "--gpu-memory", "1"]) == 2
    assert "gemma3 is not among the families in docs/backends.md" in capsys.readouterr().err


def test_a_plan_counts_a_part_of_the_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(tmp_path, "sft", "--deepspeed.stage", "0")
    words += ["--gpus", "2", "--gpu-memory", "1", "--json"]
    parts = {}
    for size in ("1", "2"):
        assert main(["plan", "sft", *words, *TENSOR[:1], size]) == 0
        layouts = json.loads(capsys.readouterr().out)["layouts"]
        layout = next(row for row in layouts if row["layout"] == "ZeRO 0")
        parts[size] = layout["parts"]["weights"]
    whole = sum(value.numel() for value in load_weights(tmp_path / "model").values())
    embedding = load_weights(tmp_path / "model")["model.embed_tokens.weight"].numel()
    assert parts == {"1": 4 * whole, "2": 4 * (embedding + (whole - embedding) // 2)}
