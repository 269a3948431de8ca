"""A reference with products in FP8 under a policy without (`model.fp8 reference`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_runs import Pairs, make_run, packed, take_a_step, write_inputs
from torch import Tensor, nn

from rlhf.commands.planning import plan_command
from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.errors import RLHFError
from rlhf.forwards import replace_forward, replaced_forward
from rlhf.model.kernels import layers
from rlhf.model.kernels.fp8 import fp8_products
from rlhf.readouts import token_logprobs
from rlhf.request.reader import read_config
from rlhf.train import context
from rlhf.train.context import RunContext
from rlhf.train.fp8_reference import fp8_line, reference_in_fp8
from rlhf.train.introduction import curve_line
from rlhf_devkit import tiny

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs of a run, on a CPU that takes the place of a device with products in FP8."""
    monkeypatch.setattr(layers, "check_compilable", lambda model, device: None)
    monkeypatch.setattr(layers, "to_fp8", round_products)
    monkeypatch.setattr(layers, "version", lambda package: "0.18.0")
    # Its rows have whole blocks only on an accelerator.
    monkeypatch.setattr(layers, "_compiled", lambda own: own)
    return write_inputs(tmp_path)


def round_products(decoder_layers: nn.ModuleList, recipe: str) -> int:
    """In the place of torchao's products: factors rounded to 8 bits."""
    assert recipe in ("rowwise", "tensorwise")

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)

    def forward(linear: Any, hidden: Tensor) -> Tensor:
        return rounded(hidden) @ rounded(linear.weight).T

    products = fp8_products(decoder_layers)
    for module in products:
        replace_forward(module, forward.__get__(module))
    return len(products)


def run_of(folder: Path, fp8: Any, **sections: Any) -> RunContext:
    model = ModelConfig(path=str(folder / "model"), dtype="bf16", fp8=fp8)
    return make_run(folder, model=model, **sections)


def num_products(run: RunContext, role: str) -> int:
    modules = run.roles[role].engine.module.modules()
    products = [module for module in modules if isinstance(module, nn.Linear)]
    return sum(replaced_forward(module) is not None for module in products)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_only_the_products_of_the_reference_are_in_fp8(
    lora: LoraConfig | None, folder: Path
) -> None:
    run = run_of(folder, "reference", lora=lora)
    reference = run.reference()
    assert "reference  engine: a second, frozen model, since model.fp8 is for it" in run.notes
    assert (num_products(run, "policy"), num_products(run, "reference")) == (0, 2 * 7)
    found = reference.token_logprobs(packed(run))
    whole = run_of(folder, None).reference("engine").token_logprobs(packed(run))
    assert 1e-4 < float((found - whole).abs().mean()) < 0.1


def test_the_policy_may_be_compiled_in_bf16(folder: Path) -> None:
    settings = ModelConfig(
        path=str(folder / "model"), dtype="bf16", fp8="reference", kernels="compile"
    )
    run = make_run(folder, model=settings)
    run.reference()
    assert (num_products(run, "policy"), num_products(run, "reference")) == (0, 2 * 7)
    assert "layers     compiled by torch.compile" in run.notes


def test_a_reference_that_moves_keeps_its_products_in_fp8(folder: Path) -> None:
    run = run_of(folder, "reference")
    reference = run.reference(every=1, mix=1.0)
    take_a_step(run, packed(run))
    run.followers[0].after_step(1)
    moved = run.roles["policy"].engine(packed(run), token_logprobs)["logprobs"].detach()
    assert 1e-4 < float((reference.token_logprobs(packed(run)) - moved).abs().mean()) < 0.1


def test_the_run_prints_how_far_the_reference_is_from_the_policy(folder: Path) -> None:
    run = run_of(folder, "reference")
    reference = run.reference()
    line = fp8_line(run, Pairs(None, run.tokenizer))
    order = run.order(Pairs(None, run.tokenizer))
    batch = order[order.step(0).micro[0]]
    start = run_of(folder, None).reference("engine")
    tokens = (reference.token_logprobs(batch) - start.token_logprobs(batch)).abs().mean()
    answers = (reference.answer_logprobs(batch) - start.answer_logprobs(batch)).abs().mean()
    assert line == (
        "reference  compiled by torch.compile, 14 products in FP8 (rowwise) by torchao 0.18.0; "
        f"its log-probabilities differ from the policy's by {tokens:.2g} per token and "
        f"{answers:.2g} per answer (mean of the first rows)"
    )
    assert curve_line(run) == [
        "curve      depends on ranks and batch.tokens: products in FP8 are rounded differently in "
        "other micro-batches"
    ]


@pytest.mark.parametrize("fp8", ["reference", "tensorwise"])
def test_a_run_without_a_second_model_is_refused(fp8: Any, folder: Path) -> None:
    run = run_of(folder, fp8)
    with pytest.raises(RLHFError) as caught:
        reference_in_fp8(run.roles)
    assert str(caught.value) == (
        "model.fp8 reference has no effect: this run has no reference that is a second language "
        "model; remove model.fp8"
    )


FORMATS = {"dpo": "preference", "kto": "unpaired", "sft": "demonstration"}


def run_whole(trainer: str, *words: str, place: Path) -> None:
    """Run `rlhf run` with `model.fp8 reference`."""
    own = tiny.short_run(place, FORMATS[trainer])
    words = ("--model.dtype", "bf16", "--model.fp8", "reference", *words)
    tiny.run(trainer, [*own, *words, "--output", str(place / "run")], str(place / "cache"))


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_run_measures_its_reference_before_the_first_step(
    trainer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_whole(trainer, place=folder)
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "products in FP8" in line and "reference" in line)
    assert "its log-probabilities differ from the policy's by 0.00" in line
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert "reference in FP8" in summary["startup"]


@pytest.mark.parametrize(("trainer", "words"), [("sft", ()), ("dpo", ("--dpo.loss", "simpo"))])
def test_a_trainer_without_a_reference_is_refused_before_weights_are_read(
    trainer: str, words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "load_model", None)
    problem = r"model\.fp8 reference has no effect: this run has no reference"
    with pytest.raises(RLHFError, match=problem):
        run_whole(trainer, *words, place=folder)
    own = tiny.short_run(folder, FORMATS[trainer])
    words = ("--model.dtype", "bf16", "--model.fp8", "reference", *words)
    request = read_config(trainer, overrides=[*own, *words])
    with pytest.raises(RLHFError, match=problem):
        plan_command(request, gpus=1, gpu_memory=80, as_json=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--lora 4 --dpo.reference cache",
            "dpo.reference cache cannot be combined with model.fp8 reference; choose engine, or "
            "remove model.fp8",
        ),
        (
            "--dpo.reference adapter",
            "dpo.reference adapter cannot be combined with model.fp8 reference; choose engine, or "
            "remove model.fp8",
        ),
        (
            "--lora 4 --model.quantize nf4",
            "model.quantize cannot be combined with model.fp8 reference; remove one of the two",
        ),
    ],
)
def test_other_references_are_refused_before_anything_loads(words: str, message: str) -> None:
    given = f"--model any --data any.jsonl --model.fp8 reference {words}"
    with pytest.raises(RLHFError) as caught:
        read_config("dpo", overrides=given.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "words",
    ["--model.kernels liger", "--model.recompute selective", "--lora 4 --lora.dora true"],
)
def test_the_policy_may_have_what_compiled_layers_may_not(words: str) -> None:
    given = f"--model any --data any.jsonl --model.fp8 reference {words}"
    config = read_config("dpo", overrides=given.split()).config
    assert not layers.compiles(config.model)
    reference = layers.for_reference(config.model)
    assert layers.compiles(reference)
    assert reference.fp8_recipe == "rowwise"


def test_the_device_is_checked_with_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(path="any", dtype="bf16", fp8="reference")
    with pytest.raises(RLHFError) as caught:
        layers.check_compilable(model, torch.device("cpu"))
    assert str(caught.value) == (
        "model.fp8 needs a CUDA device with Triton, but this run is on cpu; remove model.fp8"
    )
    monkeypatch.setattr(layers, "fused_on", lambda kind: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RLHFError, match=r"model.fp8 reference needs compute capability 9\.0"):
        layers.check_compilable(model, torch.device("cuda"))
