"""How ZeRO-3's parameters are gathered together. That curves stay the same is in test_curves.py."""

from collections import Counter

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from rlhf_devkit.problem import Case, configure, losses, start
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend
from rlhf_plugin_deepspeed.config import DeepSpeedConfig
from rlhf_plugin_deepspeed.patches.gathering import WholeLayers, prepare_gathering
from rlhf_plugin_deepspeed.patches.install import run_scope


def test_parameters_that_come_together_leave_together():
    class Handle:
        def __init__(self, params):
            self.params = params

    class Handles:
        def __init__(self, *handles):
            self.handles = handles

    first, second, third, fourth = parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter in parameters:
        parameter.ds_status = ZeroParamStatus.INFLIGHT
    inflight = WholeLayers()
    together = Handles(Handle([first]), Handle([second, third]))
    for parameter in (first, second, third):
        inflight[parameter] = together
    inflight[fourth] = alone = Handle([fourth])
    assert inflight.pop(second) is together
    assert list(inflight) == [fourth]
    assert inflight.pop(fourth) is alone
    with pytest.raises(KeyError):
        inflight.pop(first)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.zeros(1))
        self.elsewhere = []

    def ds_external_parameters(self):
        return self.elsewhere


def test_a_modules_parameters_are_looked_for_once():
    module, search = Module(), partitioned_param_coordinator.iter_params
    by_search = [list(map(id, search(module, recurse))) for recurse in (False, True)]
    prepare_gathering(module)
    try:
        iter_params = partitioned_param_coordinator.iter_params
        for _ in range(2):
            found = [list(map(id, iter_params(module, recurse))) for recurse in (False, True)]
            assert found == by_search
        module.parameters = None
        assert len(list(iter_params(module, True))) == 3
        # Those of other modules may be registered later.
        other = nn.Parameter(torch.zeros(1))
        module.elsewhere = [(0, other)]
        assert list(iter_params(module))[-1] is other
    finally:
        run_scope.close()
    assert partitioned_param_coordinator.iter_params is search


def pieces_of_an_engine():
    """Whether the registry is ours, and whether what stays whole can be read."""
    backend = DeepSpeedBackend()
    config = configure(DeepSpeedConfig(stage=3, persistence_threshold=40))
    mesh, engine, _ = start(backend, Case(config=config))
    whole = engine.deepspeed.optimizer.persistent_parameters[0]
    with deepspeed.zero.GatheredParameters([whole]):
        read = whole.detach().clone()
    ours = type(engine.module.ds_inflight_param_registry) is WholeLayers
    backend.close_mesh(mesh)
    return ours, read.shape == whole.ds_shape


def test_an_engine_has_the_patch(pair):
    assert pair.run(pieces_of_an_engine) == [(True, True)] * 2


def collectives_of_a_step():
    """DeepSpeed's gatherings of the third step, before the optimizer's step and after it, and how
    many parameters stay whole."""
    backend = DeepSpeedBackend()
    # Norms and biases stay whole on every rank.
    config = configure(DeepSpeedConfig(stage=3, persistence_threshold=40))
    mesh, engine, _ = start(backend, Case(config=config))
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": torch.ones(2)}
    seen: Counter[str] = Counter()
    name = "all_gather_into_tensor"
    theirs = deepspeed.comm.comm.cdb
    gather = getattr(theirs, name)

    def counted(*args, **more):
        seen[name] += 1
        return gather(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, name, counted)
        for _ in range(3):
            seen.clear()
            engine.backward(engine(batch, losses)["loss"].sum(), last=True)
            before = seen[name]
            engine.step()
    whole = len(engine.deepspeed.optimizer.persistent_parameters)
    backend.close_mesh(mesh)
    return before, seen[name], whole


def test_what_stays_whole_takes_one_collective_a_step(pair):
    for before, after, whole in pair.run(collectives_of_a_step):
        assert whole > 4
        # Two layers, embeddings and the head for each of two passes at most.
        assert 0 < before <= 8
        assert after == before + 1
