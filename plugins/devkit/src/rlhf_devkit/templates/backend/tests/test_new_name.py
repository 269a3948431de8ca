"""What every backend has to prove."""

from rlhf_devkit import BackendConformance


class TestNewName(BackendConformance):
    backend = "new_name"
    ranks = (1,)
    precisions = ("fp32",)
