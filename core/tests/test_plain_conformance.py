"""The plain backend against what every backend has to prove."""

from rlhf.plugin import BackendPlugin
from rlhf.registry.trainer_files import NoSettings
from rlhf.testing import BackendConformance


class TestPlain(BackendConformance):
    record = BackendPlugin(config=NoSettings, hooks="rlhf.testing.plain:PlainBackend")
    ranks = (1,)
    precisions = ("fp32",)
