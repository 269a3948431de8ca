"""The base of backends is a backend itself, and says what a subclass does not support."""

import pytest

from rlhf.errors import RLHFError
from rlhf.plugin import BackendPlugin, NoSettings
from rlhf_backend_torch import TorchBackend
from rlhf_devkit import BackendConformance
from rlhf_devkit.problem import configure


class TestTorchBackend(BackendConformance):
    record = BackendPlugin(config=NoSettings, hooks="rlhf_backend_torch:TorchBackend")
    ranks = (2,)
    precisions = ("fp32",)


class Mine(TorchBackend):
    name = "mine"


def test_a_precision_that_a_subclass_does_not_support_is_refused_by_its_name() -> None:
    with pytest.raises(RLHFError) as error:
        Mine().setup_mesh(configure(dtype="bf16"))
    assert str(error.value) == (
        "the mine backend does not support model.dtype bf16; set model.dtype to fp32 or choose "
        "another backend"
    )
