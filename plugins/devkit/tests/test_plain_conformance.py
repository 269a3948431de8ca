"""The plain backend against what every backend has to prove."""

from rlhf.plugin import BackendPlugin
from rlhf.registry.trainer_files import NoSettings
from rlhf_devkit import BackendConformance


class TestPlain(BackendConformance):
    record = BackendPlugin(config=NoSettings, hooks="rlhf_devkit.plain:PlainBackend")
    ranks = (1,)
    precisions = ("fp32",)
