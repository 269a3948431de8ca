"""How DeepSpeed's operators come to be there."""

import time
from types import SimpleNamespace

import pytest

from rlhf_plugin_deepspeed import optimizer


class Builder:
    """Takes its time."""

    def __init__(self, seconds):
        self.seconds = seconds

    def load(self, verbose):
        time.sleep(self.seconds)


TOLD = "building DeepSpeed's CPUAdam, once for this machine: a minute or two\n"


@pytest.mark.parametrize(
    ("seconds", "local_rank", "told"), [(0.3, "0", TOLD), (0.3, "1", ""), (0.0, "0", "")]
)
def test_a_long_build_is_told_once_for_a_host(monkeypatch, capsys, seconds, local_rank, told):
    accelerator = SimpleNamespace(create_op_builder=lambda name: Builder(seconds))
    monkeypatch.setattr(optimizer, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(optimizer, "SILENT_SECONDS", 0.1)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert optimizer._build.__wrapped__("CPUAdamBuilder") == ""
    time.sleep(0.2)
    assert capsys.readouterr().err == told
