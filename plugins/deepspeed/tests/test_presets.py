"""Every preset starts, and DeepSpeed's own keys beside a preset reach it: two ranks on gloo."""

import pytest
from deepspeed.accelerator import get_accelerator

from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.problem import Case, configure, follow
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.capabilities import CAPABILITIES, RAW
from rlhf_plugin_deepspeed.config import PRESETS, DeepSpeedConfig


def started(case):
    """The outcome, and the settings as DeepSpeed read them, with the CPU taken for an accelerator
    that has fp16."""
    get_accelerator().is_fp16_supported = lambda: True
    backend = DeepSpeedBackend()
    try:
        outcome, engine, mesh = follow(backend, case)
        read = engine.deepspeed._config
        settings = {
            "zero_optimization": read.zero_config.model_dump(mode="json", by_alias=True),
            "fp16": read.float16_config.model_dump(),
            "bf16": read.bfloat16_config.model_dump(),
        }
        backend.close_mesh(mesh)
        return outcome, settings
    finally:
        del get_accelerator().is_fp16_supported


@pytest.fixture(scope="module")
def plain():
    """The curve in plain torch on one process."""
    return follow(PlainBackend(), Case(config=configure()))[0]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_starts(pair, plain, name):
    preset = PRESETS[name]
    dtype = preset.dtype or "fp32"
    config = configure(DeepSpeedConfig(preset=name), dtype=dtype)
    (outcome, settings), _ = pair.run(started, Case(config=config))
    assert outcome.summary.startswith(f"ZeRO {preset.stage}, {dtype}, 2 ranks")
    zero = settings["zero_optimization"]
    assert zero["stage"] == preset.stage
    assert (zero["offload_optimizer"] is not None) is preset.offload_optimizer
    assert (zero["offload_param"] is not None) is preset.offload_param
    assert settings["bf16"]["enabled"] is (dtype == "bf16")
    assert settings["fp16"]["enabled"] is (dtype == "fp16")
    if dtype == "fp16":  # Whose scaler skips the first steps.
        assert outcome.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    else:
        rel = 1e-5 if dtype == "fp32" else 5e-3
        assert outcome.losses == pytest.approx(plain.losses, rel=rel)


VALUES = {
    "fp16.initial_scale_power": 4,
    "fp16.loss_scale_window": 2,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.contiguous_gradients": False,
    "zero_optimization.sub_group_size": 500,
    "zero_optimization.stage3_prefetch_bucket_size": 10,
    "zero_optimization.stage3_max_reuse_distance": 0,
}
"""A value for each key of DeepSpeed's that may be set, other than its default."""


def test_every_key_of_deepspeeds_is_tried():
    rows = [row.setting.removeprefix(RAW) for row in CAPABILITIES if row.setting.startswith(RAW)]
    assert sorted(rows) == sorted(VALUES)


@pytest.mark.parametrize("key", VALUES)
def test_a_deepspeed_key_of_the_configuration_keeps_the_curve(pair, plain, key):
    (row,) = (row for row in CAPABILITIES if row.setting == f"{RAW}{key}")
    section, name = key.split(".")
    raw = {section: {name: VALUES[key]}}
    dtype = "fp16" if section == "fp16" else "fp32"
    for stage in row.stages:
        threshold = {"persistence_threshold": 0} if stage == 3 else {}
        config = configure(DeepSpeedConfig(stage=stage, config=raw, **threshold), dtype=dtype)
        (outcome, settings), _ = pair.run(started, Case(config=config, micro_batches=2))
        assert settings[section][name] == VALUES[key]
        if name == "initial_scale_power":
            assert all(outcome.moved)  # At the default, 2^16, the first step is skipped.
        if section != "fp16":
            assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
            assert outcome.norms == pytest.approx(plain.norms, rel=1e-5)
