"""The table of capabilities enforced: precision, version, keys of DeepSpeed's JSON, and what a
preset sets outside of its section."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from rlhf.errors import RLHFError
from rlhf.plugin import READ_BASE, ModelConfig
from rlhf_devkit import read_config
from rlhf_devkit.problem import configure
from rlhf_plugin_deepspeed import config as section_of
from rlhf_plugin_deepspeed.capabilities import CAPABILITIES, RAW
from rlhf_plugin_deepspeed.config import (
    OTHER_NAMES,
    PRESETS,
    TRIED,
    DeepSpeedConfig,
    check,
    resolve,
)
from rlhf_plugin_deepspeed.versions import installed_version, older

ROOT = Path(__file__).parents[3]


def config(**settings):
    return configure(DeepSpeedConfig(**settings))


VALUES = {
    "deepspeed.offload_optimizer": "true",
    "deepspeed.offload_ratio": "0.5",
    "deepspeed.nvme_path": "/nvme",
    "checkpoint.async": "true",
    "deepspeed.offload_param": "true",
    "deepspeed.persistence_threshold": "0",
    "deepspeed.hpz_partition_size": "2",
    "deepspeed.bucket_size": "1000",
    "deepspeed.sequence_parallel": "2",
    "deepspeed.tensor_parallel": "2",
    "model.quantize": "nf4",
    "model.fp8": "tensorwise",
    "lora.parameters": "[experts]",
} | {f"lora.{name}": "true" for name in READ_BASE}
"""What turns a setting of the table on, unless its name says it or it is a key of JSON."""
ROWS = [row for row in CAPABILITIES if row.setting in VALUES or " " in row.setting or row.kind]


def words_for(setting):
    """The words that turn a setting on."""
    key, _, value = setting.partition(" ")
    if key.startswith(RAW):
        value = next(row.kind for row in ROWS if row.setting == key)(1)
        for name in reversed(key.removeprefix(RAW).split(".")):
            value = {name: value}
        return ["--deepspeed.config", json.dumps(value)]
    return [f"--{key}", value or VALUES[key], *(["--lora.rank", "4"] * (key == "model.quantize"))]


def read(*settings, stage, dtype):
    words = ["--deepspeed.stage", str(stage), "--model.dtype", dtype]
    words += [word for setting in settings for word in words_for(setting)]
    read_config("sft", overrides=words, inputs=False)


def refusal(*settings, stage, dtype):
    with pytest.raises(RLHFError) as error:
        read(*settings, stage=stage, dtype=dtype)
    return str(error.value)


def test_every_row_of_the_table_is_tried():
    always = {"", "deepspeed.stage", "deepspeed.offload_states"}
    assert {row.setting for row in CAPABILITIES} - {row.setting for row in ROWS} == always


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.setting)
def test_a_setting_is_taken_where_the_table_says(row):
    needed = [row.needs] if row.needs else []
    for stage in row.stages:
        for dtype in row.precisions:
            read(row.setting, *needed, stage=stage, dtype=dtype)


@pytest.mark.parametrize(
    ("row", "stage"),
    [(row, stage) for row in ROWS for stage in range(4) if stage not in row.stages],
    ids=lambda value: getattr(value, "setting", value),
)
def test_another_stage_is_refused(row, stage):
    # What it needs is refused first.
    needed = [each for each in ROWS if each.setting == row.needs]
    refused = next(each for each in (*needed, row) if stage not in each.stages)
    first, last = refused.stages[0], refused.stages[-1]
    where = f"stage {first}" if first == last else f"stages {first} to {last}"
    text = refusal(
        row.setting, *(each.setting for each in needed), stage=stage, dtype=row.precisions[0]
    )
    begin = f"{refused.setting} works only at ZeRO {where}, not at stage {stage}; "
    assert text.startswith(begin)
    assert text.removeprefix(begin).startswith(("remove it", "use the preset zero"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.setting)
def test_another_precision_is_refused(row):
    for dtype in {"fp32", "bf16", "fp16"} - {*row.precisions}:
        text = refusal(row.setting, stage=row.stages[-1], dtype=dtype)
        needed = f"{row.setting} needs model.dtype {' or '.join(row.precisions)}"
        assert text == f"{needed}; set model.dtype, or remove it"


@pytest.mark.parametrize(
    ("row", "other"),
    [(row, other) for row in ROWS for other in row.excludes],
    ids=lambda value: getattr(value, "setting", value),
)
def test_settings_that_exclude_each_other_are_refused(row, other):
    rows = [row, *(each for each in ROWS if each.setting == other)]
    stages = [stage for stage in range(4) if all(stage in each.stages for each in rows)]
    dtype = next(it for it in row.precisions if all(it in each.precisions for each in rows))
    needed = [row.needs] if row.needs else []
    text = refusal(row.setting, *needed, other, stage=(stages or row.stages)[-1], dtype=dtype)
    assert text in {
        f"{first} cannot be combined with {second}; remove one of the two"
        for first, second in ((row.setting, other), (other, row.setting))
    }


def test_settings_of_a_newer_deepspeed_are_refused_with_an_older_one(monkeypatch):
    run = config(stage=2, config={"zero_optimization": {"contiguous_gradients": False}})
    check(run)
    monkeypatch.setattr(section_of, "installed_version", lambda: "0.19.4")
    with pytest.raises(RLHFError) as error:
        check(run)
    assert str(error.value) == (
        "deepspeed.config.zero_optimization.contiguous_gradients needs deepspeed 0.19.8, but "
        "0.19.4 is installed; run pip install 'deepspeed>=0.19.8,<0.20'"
    )


WITHOUT_EFFECT = [
    (
        {"stage": 2, "config": {"fp16": {"initial_scale_power": 8}}},
        "deepspeed.config.fp16.initial_scale_power needs model.dtype fp16; set model.dtype, or "
        "remove it",
    ),
    (
        {"stage": 2, "config": {"zero_optimization": {"sub_group_size": 1000}}},
        "deepspeed.config.zero_optimization.sub_group_size works only at ZeRO stage 3, not at "
        "stage 2; remove it",
    ),
    (
        {
            "preset": "zero2_offload",
            "config": {"zero_optimization": {"contiguous_gradients": False}},
        },
        "deepspeed.config.zero_optimization.contiguous_gradients cannot be combined with "
        "deepspeed.offload_optimizer; remove one of the two",
    ),
]


@pytest.mark.parametrize(("settings", "text"), WITHOUT_EFFECT, ids=lambda value: str(value)[:60])
def test_a_key_of_deepspeeds_that_has_no_effect_is_refused(settings, text):
    with pytest.raises(RLHFError) as error:
        check(config(**settings))
    assert str(error.value) == text


def test_keys_that_other_settings_decide_are_refused_by_name():
    raw = {
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "compile": {"deepcompile": True},
        "zero_optimisation": {"overlap_comm": True},
    }
    with pytest.raises(ValueError, match="remove") as error:
        DeepSpeedConfig(config=raw)
    assert str(error.value) == (
        "remove train_batch_size (batch.size decides it); remove optimizer.type (optim decides "
        "it); remove optimizer.params.lr (optim decides it); remove bf16.enabled (model.dtype "
        "decides it); remove zero_optimization.stage (deepspeed.stage decides it); remove "
        "zero_optimization.offload_optimizer.device (deepspeed.offload_optimizer decides it); "
        "remove compile.deepcompile (DeepCompile, tried with deepspeed 0.19.8, is not offered: it "
        "adds up gradients for each compiled graph, and loses some where the micro-batches of a "
        "step run different ones; set model.kernels to compile, at stages 0 to 2); "
        "zero_optimisation.overlap_comm cannot be set here; did you mean "
        "zero_optimization.overlap_comm?"
    )
    with pytest.raises(ValueError, match=r"expects true or false, got 0$"):
        DeepSpeedConfig(config={"zero_optimization": {"overlap_comm": 0}})
    with pytest.raises(ValueError, match=r"expects a whole number, got 1\.5$"):
        DeepSpeedConfig(config={"zero_optimization": {"sub_group_size": 1.5}})


DEEP_COMPILE = (
    "DeepCompile, tried with deepspeed 0.19.8, is not offered: it adds up gradients for each "
    "compiled graph, and loses some where the micro-batches of a step run different ones; set "
    "model.kernels to compile, at stages 0 to 2"
)
ABSENT = {
    "compile": DEEP_COMPILE,
    "deepcompile": DEEP_COMPILE,
    "expert_parallel": (
        "AutoEP, tried with deepspeed 0.19.8, is not offered: it renames experts and divides them "
        "over ranks, so exports and adapters would be incomplete; remove it, or use stage 3, which "
        "shards experts"
    ),
    "ratio": "deepspeed.offload_ratio decides it",
    "zero_quantized_gradients": (
        "it rounds what ranks exchange to 8 or 4 bits, which changes the curve; "
        "deepspeed.hpz_partition_size does not"
    ),
    "zero_hpz_partition_size": "deepspeed.hpz_partition_size decides it",
    "gradient_clipping": "optim.clip decides it",
}


@pytest.mark.parametrize(("name", "reason"), ABSENT.items())
def test_what_is_not_offered_is_refused_with_the_alternative(name, reason):
    with pytest.raises(RLHFError) as error:
        read_config("sft", overrides=[f"--deepspeed.{name}", "2"], inputs=False)
    assert str(error.value) == f"deepspeed.{name}: {reason}"


def what_to_try(version):
    """What has to be tried again with this DeepSpeed before a run may use it; empty if nothing."""
    if not older(TRIED, version):
        return ""
    return (
        f"deepspeed {version} is newer than {TRIED}, with which DeepCompile and AutoEP were last "
        "tried. Try both again as benchmarks/NOTES.md says (DeepCompile, AutoEP), and read whether "
        "the quantised weights and gradients of ZeRO++ still change what ranks exchange. If they "
        "stay refused, add the outcome there and to docs/backends.md (What is not offered), and "
        "set TRIED in rlhf_plugin_deepspeed/config.py"
    )


def test_what_is_refused_was_tried_with_the_installed_deepspeed():
    assert what_to_try(TRIED) == ""
    assert what_to_try("0.19.10").startswith("deepspeed 0.19.10 is newer than ")
    untried = what_to_try(installed_version())
    assert not untried, untried


def test_the_notes_of_what_is_refused_name_the_version_that_was_tried():
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for name in ("DeepCompile", "AutoEP"):
        (heading,) = [line for line in notes if line.startswith(f"## {name} (")]
        assert heading.endswith(f", DeepSpeed {TRIED})")
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        assert f"with {TRIED})" in row


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("offload_optimizer", "nvme", "set it to true and deepspeed.nvme_path to a folder"),
        ("offload_param", "nvme", "set it to true and deepspeed.nvme_path to a folder"),
        ("offload_param", "disk", 'expected true or false, got "disk"'),
    ],
)
def test_a_value_that_is_not_offered_is_refused_with_the_alternative(name, value, reason):
    with pytest.raises(RLHFError) as error:
        read_config("sft", overrides=[f"--deepspeed.{name}", value], inputs=False)
    assert str(error.value) == f"deepspeed.{name}: {reason}"


def test_keys_of_zeropp_are_refused_by_name():
    for key in ("weights", "gradients", "nontrainable_weights"):
        with pytest.raises(ValueError, match="remove") as error:
            DeepSpeedConfig(config={"zero_optimization": {f"zero_quantized_{key}": True}})
        assert str(error.value) == (
            f"remove zero_optimization.zero_quantized_{key} (it rounds what ranks exchange to 8 or "
            "4 bits, which changes the curve; deepspeed.hpz_partition_size does not)"
        )
    with pytest.raises(ValueError, match="remove") as error:
        DeepSpeedConfig(config={"zero_optimization": {"zero_hpz_partition_size": 2}})
    assert str(error.value) == (
        "remove zero_optimization.zero_hpz_partition_size (deepspeed.hpz_partition_size decides it)"
    )


def test_deepspeeds_own_keys_are_read_from_the_command_line():
    words = [
        "--deepspeed",
        "zero2",
        "--deepspeed.config",
        "{zero_optimization: {overlap_comm: no}}",
    ]
    section = read_config("sft", overrides=words, inputs=False).config.backend_section
    assert section.config == {"zero_optimization": {"overlap_comm": False}}
    with pytest.raises(RLHFError) as error:
        read_config("sft", overrides=["--deepspeed.config", "{scheduler: {type: x}}"], inputs=False)
    assert str(error.value) == (
        "deepspeed.config: remove scheduler.type (optim.schedule decides it)"
    )


def test_a_preset_with_a_dtype_sets_it_unless_another_is_set():
    def dtype(*words):
        return read_config("sft", overrides=words, inputs=False).config.model.dtype

    assert dtype("--deepspeed", "zero2_fp16") == dtype("--deepspeed", "zero2-fp16") == "fp16"
    assert dtype("--deepspeed", "zero2_bf16", "--model.dtype", "bf16") == "bf16"
    # The demo's fp32 is a default too.
    demo = read_config("sft", overrides=["--deepspeed", "zero2-bf16"])
    assert (demo.demo, demo.config.model.dtype) == (True, "bf16")
    with pytest.raises(RLHFError) as error:
        dtype("--deepspeed", "zero2-fp16", "--model.dtype", "fp32")
    assert str(error.value) == (
        "model.dtype is fp32 but the preset zero2-fp16 is fp16; set only one of the two"
    )


@pytest.mark.parametrize(("name", "ours"), OTHER_NAMES.items())
def test_the_names_of_others_are_names_of_presets(name, ours):
    preset = PRESETS[ours]
    run = evolve(config(preset=name), model=ModelConfig(dtype=preset.dtype or "fp32"))
    check(run)
    assert resolve(run.backend_section) == resolve(DeepSpeedConfig(preset=ours))
    assert resolve(run.backend_section).stage == preset.stage
