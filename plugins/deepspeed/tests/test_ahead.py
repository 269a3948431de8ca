"""How far the host may be ahead of the device under ZeRO-3."""

from types import SimpleNamespace

import pytest
import torch
from streams import Stream

from rlhf.errors import RLHFError
from rlhf.testing.problem import Case, Packed, configure, losses, shape, start
from rlhf_plugin_deepspeed import prepare
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.patches import ahead
from rlhf_plugin_deepspeed.patches.ahead import Backlog, fence_of, run_ahead


def test_the_host_waits_for_the_device_where_memory_ends(monkeypatch):
    waited = []

    class Event:
        """Of work that the device has done or not."""

        count = 0

        def __init__(self):
            self.number = Event.count
            Event.count += 1

        def record(self): ...

        def query(self):
            return self.number in done

        def synchronize(self):
            waited.append(self.number)
            done.add(self.number)

    done: set[int] = set()
    accelerator = SimpleNamespace(Event=Event)
    monkeypatch.setattr(ahead, "get_accelerator", lambda: accelerator)
    backlog = Backlog(100)
    for elements in (30, 30, 30):
        backlog.released(elements)
    backlog.make_room(10)
    assert waited == []
    # Room for the first is enough.
    backlog.make_room(20)
    assert waited == [0]
    done.add(1)
    backlog.make_room(60)
    assert waited == [0]
    # What is gathered may fill everything by itself.
    backlog.make_room(200)
    backlog.make_room(200)
    assert waited == [0, 2]


def test_the_host_may_be_ahead_by_more_than_two_gatherings(monkeypatch):
    class PartitionedParameterCoordinator:
        def __init__(self):
            self.calls = []
            self.__max_ongoing_fetch_events = 2
            self.__n_available_params = 0

        def fetch_sub_module(self, current_submodule, forward):
            self.calls.append(f"fetch {current_submodule}")
            self.__n_available_params += 700

        def release_sub_module(self, submodule, forward=False):
            self.__n_available_params -= 700

    coordinator = PartitionedParameterCoordinator()

    class Event:
        """Of work that the device has not done."""

        def record(self): ...

        def query(self):
            return False

        def synchronize(self):
            coordinator.calls.append("wait")

    accelerator = SimpleNamespace(is_synchronized_device=lambda: False, Event=Event)
    monkeypatch.setattr(ahead, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(ahead, "MOST_LIVE", 1500)
    run_ahead(SimpleNamespace(get_param_coordinator=lambda: coordinator), layer=50)
    assert coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events == 5
    for layer in range(4):
        coordinator.fetch_sub_module(layer, forward=True)
        coordinator.release_sub_module(layer, forward=True)
    # Beside 1500 elements that the device has still to read nothing more is gathered.
    assert coordinator.calls == ["fetch 0", "fetch 1", "fetch 2", "wait", "fetch 3"]


def engines_that_run_ahead():
    """Of a policy and a reference, the elements of a layer for which they are patched and those of
    the largest layer."""
    backend, told, undo = DeepSpeedBackend(), [], pytest.MonkeyPatch()
    undo.setattr(prepare, "run_ahead", lambda offload, layer: told.append((offload, layer)))
    config = configure(DeepSpeedConfig(stage=3))
    try:
        mesh, policy, _ = start(backend, Case(config=config))
        plan = backend.configure_zero(config, mesh, shape())
        with backend.model_context(plan, "reference"):
            module = Packed().requires_grad_(False)
        backend.prepare(module, None, None, "reference", plan, mesh)
    finally:
        undo.undo()
    layers = policy.module.model.layers
    largest = max(sum(item.ds_numel for item in layer.parameters()) for layer in layers)
    backend.close_mesh(mesh)
    return [(layer, largest) for _, layer in told]


def test_every_engine_of_stage_3_may_be_ahead(pair):
    for policy, reference in pair.run(engines_that_run_ahead):
        assert policy == reference
        layer, largest = policy
        assert layer == largest > 0


def test_gathering_stays_behind_the_update(monkeypatch):
    waits = []
    accelerator = SimpleNamespace(
        is_synchronized_device=lambda: False, current_stream=lambda: Stream("compute", waits)
    )
    monkeypatch.setattr(ahead, "get_accelerator", lambda: accelerator)
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
    undo.setattr(prepare, "fence_of", lambda offload: lambda: calls.append("fence"))
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
