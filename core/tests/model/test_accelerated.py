"""The gateway to kernels: what is refused, and runs without any."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import BareEngine
from families import random_model

from rlhf.config.sections import ModelConfig
from rlhf.devices import rehearsing_on
from rlhf.engine import Axis, Mesh
from rlhf.errors import RLHFError
from rlhf.model import accelerated, packed
from rlhf.model.accelerated import (
    advice,
    check_packed,
    installed_kernels,
    kernels_on,
    needed_kernels,
    recompute_levels,
)
from rlhf.model.packed import PackedModel
from rlhf.model.probe import choose_path
from rlhf.registry.installed import find_kernels
from rlhf.request.reader import read_config
from rlhf.train.context import RunContext
from rlhf_devkit import tiny
from rlhf_devkit.families import FAMILIES
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend

META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution of kernels is installed."""
    monkeypatch.setattr(accelerated, "installed_kernels", lambda: None)


def curve(folder: Path, output: str, cache: Path) -> list[float]:
    words = tiny.short_run(folder, "demonstration")
    tiny.run("sft", [*words, "--output", str(folder / output)], str(cache))
    lines = (folder / output / "metrics.jsonl").read_text().splitlines()
    return [value["loss"] for value in map(json.loads, lines) if "loss" in value]


def test_a_run_without_kernels_has_the_same_curve(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels = curve(tmp_path, "with", cache)
    assert len(with_kernels) > 1
    monkeypatch.setattr(accelerated, "installed_kernels", lambda: None)
    assert curve(tmp_path, "without", cache) == with_kernels


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kernels": "liger"}, "model.kernels liger"),
        ({"kernels": "compile"}, "model.kernels compile"),
        ({"fp8": "rowwise"}, "model.fp8"),
        ({"recompute": "selective"}, "model.recompute selective"),
    ],
)
def test_a_setting_that_needs_kernels_names_the_package(
    settings: dict[str, Any], name: str, without_kernels: None
) -> None:
    with pytest.raises(RLHFError) as caught:
        needed_kernels(ModelConfig(**settings))
    assert str(caught.value) == (
        f"{name} needs kernels; run `pip install rlhf-kernels`, or remove {name}"
    )
    assert needed_kernels(ModelConfig()) is None


def test_a_run_on_cuda_without_kernels_says_so(without_kernels: None) -> None:
    assert recompute_levels(ModelConfig()) == ["full"]
    with rehearsing_on("cuda"):
        assert kernels_on(META) is None
        assert advice(META) == [
            "kernels    none, so that layers run in plain torch: run `pip install rlhf-kernels` "
            "for the fused ones"
        ]
    assert advice(CPU) == []


def test_two_distributions_of_kernels_are_refused(install: Callable[..., Path]) -> None:
    assert find_kernels() is None
    install("rlhf-kernels", {"kernels": {"triton": "one:plugin"}})
    found = find_kernels()
    assert found is not None
    assert str(found) == "kernels 'triton' of rlhf-kernels 1.0"
    install("others", {"kernels": {"fast": "two:plugin"}})
    with pytest.raises(RLHFError) as caught:
        find_kernels()
    assert str(caught.value) == (
        "several kernels are installed (fast of others and triton of rlhf-kernels); uninstall all "
        "but one"
    )


def test_kernels_that_cannot_be_imported_are_named(install: Callable[..., Path]) -> None:
    groups = {"kernels": {"mine": "my_kernels:plugin"}}
    record = "from rlhf.plugin import KernelsPlugin\nplugin = KernelsPlugin(kernels='gone:Mine')"
    install("rlhf-mine", groups, {"my_kernels": record})
    installed_kernels.cache_clear()
    try:
        with pytest.raises(RLHFError) as caught:
            installed_kernels()
    finally:
        installed_kernels.cache_clear()
    assert str(caught.value) == (
        "kernels 'mine' of rlhf-mine 1.0 cannot be imported: ModuleNotFoundError: No module named "
        "'gone' (`python -c 'import gone'` shows where)"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--model.fp8", "tensorwise", "--model.dtype", "fp32"],
            "model.fp8 needs model.dtype bf16; set model.dtype, or remove it",
        ),
        (
            ["--model.fp8", "tensorwise", "--lora.dora", "true"],
            "lora.dora cannot be combined with model.fp8; remove one of the two",
        ),
        (
            ["--model.fp8", "rowwise", "--model.kernels", "liger"],
            "model.fp8 needs compiled layers; set model.kernels to auto",
        ),
        (
            ["--model.kernels", "compile", "--lora", "4", "--model.quantize", "nf4"],
            "model.quantize cannot be combined with model.kernels compile; remove one of the two",
        ),
        (
            ["--model.kernels", "compile", "--model.recompute", "selective"],
            "model.recompute selective cannot be combined with model.kernels compile; set it to "
            "auto, none or full",
        ),
        (
            ["--model.fp8", "tensorwise", "--model.recompute", "selective"],
            "model.recompute selective cannot be combined with model.fp8; set it to auto, none "
            "or full",
        ),
        (
            ["--model.kernels", "compile", "--deepspeed.stage", "3"],
            "model.kernels compile works only at ZeRO stages 0 to 2, not at stage 3; use the "
            "preset zero2",
        ),
    ],
)
def test_conflicting_settings_are_reported_with_the_configuration(
    words: list[str], problem: str
) -> None:
    with pytest.raises(RLHFError) as caught:
        read_config("sft", overrides=words, inputs=False)
    assert str(caught.value) == problem


def test_models_without_packed_rows_cannot_be_compiled() -> None:
    model = ModelConfig(kernels="compile")
    with pytest.raises(RLHFError) as caught:
        check_packed("padded", "packed was off by 0.3", model, Axis())
    assert str(caught.value) == (
        "model.kernels compile needs packed rows, but this model runs on the path 'padded' (packed "
        "was off by 0.3); remove model.kernels compile"
    )
    check_packed("packed", "", model, Axis())


def test_compile_is_refused_for_recurrent_layers_before_weights_are_read(tmp_path: Path) -> None:
    config_class, options = FAMILIES["LFM2"]
    getattr(transformers, config_class)(**options).save_pretrained(tmp_path)
    words = ["--model.path", str(tmp_path), "--model.kernels", "compile", "--model.dtype", "fp32"]
    config = read_config("sft", overrides=words, inputs=False).config
    hooks, _ = build_gateways(PlainBackend())
    run = RunContext(config=config, tokenizer=None, mesh=Mesh(), hooks=hooks, steps=1, longest=8)
    # There are no weights in the folder.
    with pytest.raises(RLHFError) as caught:
        run.load("policy")
    assert str(caught.value) == (
        "model.kernels compile cannot compile recurrent layers (conv); remove model.kernels compile"
    )


def test_a_state_cannot_be_divided() -> None:
    check_packed("tree", "", ModelConfig(), Axis(), ["conv"])
    with pytest.raises(RLHFError) as error:
        check_packed("tree", "", ModelConfig(), Axis(size=2), ["conv"])
    assert str(error.value) == (
        "sequence ranks cannot divide the state of recurrent layers (conv); set sequence_parallel "
        "to 1"
    )


def test_without_kernels_a_model_with_recurrent_layers_runs_padded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed, "installed_kernels", lambda: None)
    module = PackedModel(random_model("Bamba"))
    choice = choose_path(BareEngine(module), Mesh())  # type: ignore[arg-type]
    assert (choice.path, choice.reason) == (
        "padded", "it has recurrent layers (linear_attention), and rlhf-kernels is not installed"
    )  # fmt: skip
