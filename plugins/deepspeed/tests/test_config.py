"""The section `deepspeed:` without DeepSpeed: presets, refusals word for word."""

import re
import subprocess
import sys

import pytest
from attrs import evolve
from plans import config

from rlhf.errors import RLHFError
from rlhf.plugin import ModelConfig
from rlhf_devkit import read_config
from rlhf_plugin_deepspeed import capabilities
from rlhf_plugin_deepspeed import config as section_of
from rlhf_plugin_deepspeed.config import DeepSpeedConfig, Resolved, check, resolve

REFUSED = [
    (
        {"preset": "zero2", "stage": 3},
        "deepspeed.stage is 3 but the preset zero2 is stage 2; set only one of the two",
    ),
    (
        {"preset": "zero2_offload", "offload_optimizer": False},
        "deepspeed.offload_optimizer is false but the preset zero2_offload turns it on; use the "
        "preset zero2",
    ),
    (
        {"preset": "zero3_cpuoffload", "offload_param": False},
        "deepspeed.offload_param is false but the preset zero3_cpuoffload turns it on; use the "
        "preset zero3",
    ),
    (
        {"stage": 0, "offload_optimizer": True},
        "deepspeed.offload_optimizer works only at ZeRO stages 1 to 3, not at stage 0; "
        "remove it or use the preset zero1_offload",
    ),
    (
        {"preset": "zero2", "offload_param": True},
        "deepspeed.offload_param works only at ZeRO stage 3, not at stage 2; remove it or "
        "use the preset zero3_offload",
    ),
    (
        {"stage": 1, "persistence_threshold": 0},
        "deepspeed.persistence_threshold works only at ZeRO stage 3, not at stage 1; remove "
        "it or set deepspeed.stage to 3",
    ),
    (
        {"persistence_threshold": 0},
        "deepspeed.persistence_threshold works only at ZeRO stage 3, not at stage auto; "
        "remove it or set deepspeed.stage to 3",
    ),
    (
        {"preset": "ddp", "bucket_size": 1000},
        "deepspeed.bucket_size works only at ZeRO stages 1 to 3, not at stage 0; remove it "
        "or use the preset zero1",
    ),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_settings_without_effect_are_refused(settings, text):
    with pytest.raises(RLHFError) as error:
        check(config(**settings))
    assert str(error.value) == text


def test_a_quantized_base_is_refused_at_stage_3():
    run = evolve(config(stage=3), model=ModelConfig(quantize="nf4"))
    with pytest.raises(RLHFError) as error:
        check(run)
    assert str(error.value) == (
        "model.quantize works only at ZeRO stages 0 to 2, not at stage 3; use the preset "
        "zero2, which shards what the adapter trains"
    )


TENSOR_REFUSED = [
    (
        {"stage": 3},
        {},
        "deepspeed.tensor_parallel works only at ZeRO stages 0 to 2, not at stage 3; use the "
        "preset zero2, or remove it: stage 3 divides all weights itself",
    ),
    (
        {},
        {"dtype": "fp16"},
        "deepspeed.tensor_parallel needs model.dtype fp32 or bf16; set model.dtype, or remove it",
    ),
    (
        {},
        {"quantize": "nf4"},
        "deepspeed.tensor_parallel cannot be combined with model.quantize; remove one of the two",
    ),
    (
        {},
        {"kernels": "compile"},
        "deepspeed.tensor_parallel cannot be combined with model.kernels compile; remove one of "
        "the two",
    ),
    (
        {},
        {"fp8": "tensorwise"},
        "deepspeed.tensor_parallel cannot be combined with model.fp8; remove one of the two",
    ),
]


@pytest.mark.parametrize(("settings", "model", "text"), TENSOR_REFUSED, ids=str)
def test_a_tensor_axis_is_refused_with_what_it_cannot_divide(settings, model, text):
    run = config(tensor_parallel=2, **settings)
    with pytest.raises(RLHFError) as error:
        check(evolve(run, model=ModelConfig(**{"dtype": "bf16", **model})))
    assert str(error.value) == text


def test_dora_is_refused_under_a_tensor_axis():
    words = ["--lora.dora", "true", "--deepspeed.tensor_parallel", "2"]
    with pytest.raises(RLHFError) as error:
        read_config("sft", overrides=words, inputs=False)
    assert str(error.value) == (
        "deepspeed.tensor_parallel cannot be combined with lora.dora; remove one of the two"
    )


def test_a_tensor_axis_needs_a_tested_deepspeed(monkeypatch):
    monkeypatch.setattr(section_of, "installed_version", lambda: "0.19.4")
    with pytest.raises(RLHFError) as error:
        check(config(tensor_parallel=2))
    assert str(error.value) == (
        "deepspeed.tensor_parallel needs deepspeed 0.19.8, but 0.19.4 is installed; run pip "
        "install 'deepspeed>=0.19.8,<0.20'"
    )


def test_presets_fill_unset_settings():
    assert resolve(DeepSpeedConfig()) == Resolved(
        stage="auto", offload_optimizer=False, offload_param=False
    )
    assert resolve(DeepSpeedConfig(preset="zero1", offload_optimizer=True)) == Resolved(
        stage=1, offload_optimizer=True, offload_param=False
    )
    assert resolve(DeepSpeedConfig(preset="zero3_cpuoffload", stage=3)) == Resolved(
        stage=3, offload_optimizer=True, offload_param=True
    )
    assert resolve(DeepSpeedConfig(offload_param=True)).stage == 3


def test_a_deepspeed_out_of_range_is_refused_by_number_not_by_text():
    with pytest.raises(RLHFError) as error:
        capabilities.check_version("0.18.9")
    assert str(error.value) == (
        "deepspeed 0.18.9 is too old: it loses gradients at stage 2 with the optimizer on the CPU; "
        "run pip install 'deepspeed>=0.19,<0.20'"
    )
    with pytest.raises(RLHFError) as error:
        capabilities.check_version("0.20.0")
    assert str(error.value) == (
        "deepspeed 0.20.0 is too new: this backend patches internals of deepspeed 0.19; run pip "
        "install 'deepspeed>=0.19,<0.20'"
    )
    for version in ("0.19.0", "0.19.10", "0.19.1+cu130"):
        capabilities.check_version(version)
    for version in ("0.9.99", "0.100.0", "1.0", "0.20.0rc1"):
        with pytest.raises(RLHFError):
            capabilities.check_version(version)


def test_the_record_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from rlhf_plugin_deepspeed import plugin; import "
        "rlhf_plugin_deepspeed.config as c; c.installed_version(); print([m for m in ('torch', "
        "'deepspeed', 'transformers', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zero9", "did you mean zero?"),
        ("ZeRO2", "did you mean zero2?"),
        ("fast", "available: auto, ddp, zero1, "),
    ],
)
def test_an_unknown_preset_gets_a_near_match_or_the_list(name, hint):
    with pytest.raises(ValueError, match=re.escape(f"unknown preset {name}; {hint}")):
        DeepSpeedConfig(preset=name)
