"""DeepSpeed against what every backend has to prove."""

from rlhf.testing import BackendConformance


class TestDeepSpeed(BackendConformance):
    backend = "deepspeed"
