"""What `rlhf doctor` says about DeepSpeed."""

import pytest
from deepspeed.accelerator import get_accelerator

from rlhf_plugin_deepspeed import diagnosis


def found(subject):
    return next(each for each in diagnosis.diagnose() if each.subject == subject)


@pytest.fixture
def version(monkeypatch):
    return lambda number: monkeypatch.setattr(diagnosis, "installed_version", lambda: number)


def test_a_deepspeed_out_of_range_is_missing_with_the_command(version):
    version("0.18.9")
    (old, *_) = diagnosis.diagnose()
    assert (old.subject, old.state) == ("deepspeed", "missing")
    assert old.here.startswith("deepspeed 0.18.9 is too old: it loses gradients")
    assert old.remedy == "pip install 'deepspeed>=0.19,<0.20'"


def test_a_deepspeed_newer_than_the_tested_ones_lacks_the_patches_for_speed(version):
    version("0.19.99")
    newer = found("deepspeed")
    assert (newer.state, newer.feature) == ("optional", "patches for speed")
    assert newer.remedy == f"pip install 'deepspeed=={diagnosis.NEWEST}'"


def test_a_setting_that_needs_a_newer_deepspeed_is_reported(version):
    version("0.19.4")
    ok, *lacking = [each for each in diagnosis.diagnose() if each.subject == "deepspeed"]
    assert (ok.state, {lacks.state for lacks in lacking}) == ("ok", {"optional"})
    assert [lacks.feature for lacks in lacking] == [
        "deepspeed.hpz_partition_size",
        "deepspeed.tensor_parallel",
        "deepspeed.config.zero_optimization.contiguous_gradients",
    ]
    assert {lacks.remedy for lacks in lacking} == {"pip install 'deepspeed>=0.19.8,<0.20'"}


def test_an_accelerator_without_bf16_needs_another_dtype(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_bf16_supported", lambda: False)
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    assert found("model.dtype").here == "fp32, fp16"
    assert found("model.dtype").remedy == "set model.dtype to fp16"


def test_ranks_use_the_communication_of_the_accelerator():
    name, _, version = found("communication").here.partition(" ")
    assert name == get_accelerator().communication_backend_name()
    assert bool(version) is (name == "nccl")
