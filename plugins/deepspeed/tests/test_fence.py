"""Under ZeRO-3 weights are gathered after their update."""

from types import SimpleNamespace

import pytest
import torch
from streams import Stream

from rlhf.errors import RLHFError
from rlhf_devkit.problem import Case, configure, losses, start
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.patches import stage_3
from rlhf_plugin_deepspeed.patches.stage_3 import fence_of


def test_gathering_stays_behind_the_update(monkeypatch):
    waits = []
    accelerator = SimpleNamespace(
        is_synchronized_device=lambda: False, current_stream=lambda: Stream("compute", waits)
    )
    monkeypatch.setattr(stage_3, "get_accelerator", lambda: accelerator)
    name = "_DeepSpeedZeRoOffload__allgather_stream"
    fence_of(SimpleNamespace(**{name: Stream("gathering", waits)}))()
    assert waits == ["gathering waits for compute"]


def test_a_stream_that_is_not_known_is_an_error():
    with pytest.raises(RLHFError) as error:
        fence_of(SimpleNamespace())
    assert "patch gather-after-update" in str(error.value)
    assert "DeepSpeedZeRoOffload.__allgather_stream is missing" in str(error.value)


def fences_of_steps(precision):
    """The updates of two steps and what keeps gatherings behind them, in their order."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(stage=3), dtype=precision, states=precision)
    calls, undo = [], pytest.MonkeyPatch()
    undo.setattr(stage_3, "fence_of", lambda offload: lambda: calls.append("fence"))
    mesh, engine, _ = start(backend, Case(config=config))
    undo.undo()
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(2)}
    update = engine.deepspeed.step

    def step():
        calls.append("update")
        update()

    engine.deepspeed.step = step
    for _ in range(2):
        engine.backward(engine(batch, losses)["loss"].sum(), last=True)
        engine.step()
    backend.close_mesh(mesh)
    return calls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_update_is_followed_by_a_fence(pair, precision):
    assert pair.run(fences_of_steps, precision) == [["update", "fence"] * 2] * 2
