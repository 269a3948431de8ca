"""How far the host may be ahead of the device under ZeRO-3."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_deepspeed.ahead import Backlog, fence_of, run_ahead
from rlhf_plugin_deepspeed.gathering import PRIVATE, coordinator_of

from rlhf.testing.problem import Case, Packed, configure, losses, shape, start
from rlhf_plugin_deepspeed import ahead
from rlhf_plugin_deepspeed import engine as engines
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig


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
    class Coordinator:
        def __init__(self):
            self.calls = []
            for name in PRIVATE:
                setattr(self, f"_Coordinator__{name}", None)
            self._Coordinator__n_available_params = 0

        def fetch_sub_module(self, module, forward):
            self.calls.append(f"fetch {module}")
            self._Coordinator__n_available_params += 700

        def release_sub_module(self, module, forward=False):
            self._Coordinator__n_available_params -= 700

    coordinator = Coordinator()

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
    assert coordinator._Coordinator__max_ongoing_fetch_events == 5
    for layer in range(4):
        coordinator.fetch_sub_module(layer, forward=True)
        coordinator.release_sub_module(layer, forward=True)
    # Beside 1500 elements that the device has still to read nothing more is gathered.
    assert coordinator.calls == ["fetch 0", "fetch 1", "fetch 2", "wait", "fetch 3"]


def test_a_deepspeed_of_other_names_keeps_its_bounds(monkeypatch):
    class Coordinator: ...

    coordinator = Coordinator()
    accelerator = SimpleNamespace(is_synchronized_device=lambda: False)
    monkeypatch.setattr(ahead, "get_accelerator", lambda: accelerator)
    run_ahead(SimpleNamespace(get_param_coordinator=lambda: coordinator), layer=100)
    assert not vars(coordinator)


def engines_that_run_ahead():
    """Of a policy and a reference: whether DeepSpeed's names are known, the elements of a layer
    that are told, and those that its largest layer has."""
    backend, told, undo = DeepSpeedBackend(), [], pytest.MonkeyPatch()
    undo.setattr(engines, "run_ahead", lambda offload, layer: told.append((offload, layer)))
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
    facts = [(coordinator_of(offload)[1] is not None, layer, largest) for offload, layer in told]
    backend.close_mesh(mesh)
    return facts


def test_every_engine_of_stage_3_may_be_ahead(pair):
    for policy, reference in pair.run(engines_that_run_ahead):
        assert policy == reference
        known, layer, largest = policy
        assert known
        assert layer == largest > 0


class Stream:
    """A stream that notes what it waits for; `synchronize` is a wait of the host."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wait_stream(self, other):
        self.seen.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.seen.append(f"the host waits for {self.name}")


@pytest.mark.parametrize(
    ("offload", "seen"),
    [
        ("_DeepSpeedZeRoOffload__allgather_stream", "gathering waits for compute"),
        ("_DeepSpeedZeRoOffload__of_a_later_name", "the host waits for compute"),
    ],
)
def test_gathering_stays_behind_the_update(monkeypatch, offload, seen):
    waits = []
    accelerator = SimpleNamespace(
        is_synchronized_device=lambda: False, current_stream=lambda: Stream("compute", waits)
    )
    monkeypatch.setattr(ahead, "get_accelerator", lambda: accelerator)
    fence_of(SimpleNamespace(**{offload: Stream("gathering", waits)}))()
    assert waits == [seen]


def fences_of_steps(precision):
    """The updates of two steps and what keeps gatherings behind them, in their order."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(stage=3), dtype=precision, states=precision)
    mesh, engine, _ = start(backend, Case(config=config))
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(2)}
    calls, update = [], engine.deepspeed.step

    def step():
        calls.append("update")
        update()

    engine.deepspeed.step = step
    engine._fence = lambda: calls.append("fence")
    for _ in range(2):
        engine.backward(engine(batch, losses)["loss"].sum(), last=True)
        engine.step()
    backend.close_mesh(mesh)
    return calls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_update_is_followed_by_a_fence(pair, precision):
    assert pair.run(fences_of_steps, precision) == [["update", "fence"] * 2] * 2
