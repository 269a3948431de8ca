"""DeepSpeed against what every backend has to prove."""

from rlhf_devkit import BackendConformance


class TestDeepSpeed(BackendConformance):
    backend = "deepspeed"
