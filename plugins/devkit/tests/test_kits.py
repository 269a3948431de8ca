"""The kits of backends and observers find what is wrong: each fault fails its own test, with the
promise that it breaks."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlhf.engine import Plan
from rlhf.hookspecs import hookimpl
from rlhf.plugin import BackendPlugin
from rlhf.registry.trainer_files import NoSettings
from rlhf_backend_torch import TorchEngine
from rlhf_devkit import (
    BackendConformance,
    ObserverConformance,
    PlainBackend,
    TrainerConformance,
    backend_conformance,
    bench,
    tiny,
)
from rlhf_devkit.backend_conformance import Problems
from rlhf_devkit.observer_conformance import Watched, watched_by
from rlhf_devkit.ranks import RankFailure

KITS = (TrainerConformance, BackendConformance, ObserverConformance)
DOCS = Path(__file__).parents[3] / "docs"


class Unclipped(PlainBackend):
    """Forgets to clip."""

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        plan.settings["clip"] = 0.0
        return super().prepare(model, optimizer, schedule, role, plan, mesh)


class Forgetful(PlainBackend):
    """Restores no moments."""

    @hookimpl
    def load_checkpoint(self, engine: Any, saved: Any) -> bool:
        super().load_checkpoint(engine, saved)
        engine.optimizer.state.clear()
        return True


class Thawed(PlainBackend):
    """Leaves the gradients of a frozen model on."""

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        return TorchEngine(model, optimizer, schedule, role=role, plan=plan, mesh=mesh)


class Lossy(PlainBackend):
    """Rounds the weights that leave the device."""

    @hookimpl
    def offload_states(self, engine: Any, kinds: Any) -> int:
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.half().float()
        return 0


class Reversed(PlainBackend):
    """Mixes weights by the other share."""

    @hookimpl
    def mix_weights(self, engine: Any, source: Any, share: float, names: Any) -> Any:
        return super().mix_weights(engine, source, 1 - share, names)


class Sharded(PlainBackend):
    """Says that weights are sharded, so that a run loads them by the hook; sound."""

    @hookimpl
    def configure_zero(
        self, config: Any, mesh: Any, model_shape: Any, role: Any, trained: Any, occupied: Any
    ) -> Plan:
        plan = super().configure_zero(config, mesh, model_shape, role, trained, occupied)
        return attrs.evolve(plan, sharded=True)

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        engine: Any = super().prepare(model, optimizer, schedule, role, plan, mesh)
        engine.sharded = True
        return engine


class PreparesWhatItLoaded(Sharded):
    """Takes the module of `load_weights` for that of `prepare`."""

    @hookimpl
    def load_weights(self, module: Any, weights: Any, plan: Any, mesh: Any) -> tuple[str, ...]:
        module.is_sharded = True
        return super().load_weights(module, weights, plan, mesh)

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        assert model.is_sharded
        return super().prepare(model, optimizer, schedule, role, plan, mesh)


class OptimizesWhatItLoaded(Sharded):
    """Takes the module of `load_weights` for that of `build_optimizer`."""

    loaded: Any = None

    @hookimpl
    def load_weights(self, module: Any, weights: Any, plan: Any, mesh: Any) -> tuple[str, ...]:
        self.loaded = module
        return super().load_weights(module, weights, plan, mesh)

    @hookimpl
    def build_optimizer(self, groups: Any, config: Any, plan: Any, model: Any) -> Any:
        assert model is self.loaded
        return super().build_optimizer(groups, config, plan, model)


class LoadsEverything(Sharded):
    """Expects that `load_weights` has seen each module, also one of the trainer's own."""

    @hookimpl
    def load_weights(self, module: Any, weights: Any, plan: Any, mesh: Any) -> tuple[str, ...]:
        module.is_sharded = True
        return super().load_weights(module, weights, plan, mesh)

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        assert model.model.is_sharded or model.model.base_model.is_sharded
        return super().prepare(model, optimizer, schedule, role, plan, mesh)


class NeedsContext(PlainBackend):
    """Prepares in `model_context`, which a run enters only for sharded weights."""

    entered = False

    @hookimpl
    def model_context(self, plan: Any, role: Any, mesh: Any) -> Any:
        self.entered = True
        return super().model_context(plan, role, mesh)

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        assert self.entered
        return super().prepare(model, optimizer, schedule, role, plan, mesh)


class WholeAfterForward(PlainBackend):
    """Cannot save between a forward and its backward, as FSDP2 whose root stays whole."""

    @hookimpl
    def prepare(
        self, model: Any, optimizer: Any, schedule: Any, role: Any, plan: Any, mesh: Any
    ) -> Any:
        engine: Any = super().prepare(model, optimizer, schedule, role, plan, mesh)
        engine.is_whole = False
        model.register_forward_hook(lambda *_: setattr(engine, "is_whole", True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda _: setattr(engine, "is_whole", False))
        return engine

    @hookimpl
    def save_checkpoint(self, engine: Any) -> Any:
        assert not engine.is_whole
        return super().save_checkpoint(engine)


class OneOptimizer(PlainBackend):
    """Trains one model."""

    optimizer: Any = None

    @hookimpl
    def build_optimizer(self, groups: Any, config: Any, plan: Any, model: Any) -> Any:
        assert self.optimizer is None
        self.optimizer = super().build_optimizer(groups, config, plan, model)
        return self.optimizer


FAULTS: dict[type, Callable[..., None]] = {
    Unclipped: BackendConformance.test_the_steps_are_those_of_plain_torch,
    Forgetful: BackendConformance.test_a_resumed_run_is_the_same,
    Thawed: BackendConformance.test_a_frozen_engine_takes_no_gradient,
    Lossy: BackendConformance.test_offloaded_states_come_back,
    Reversed: BackendConformance.test_weights_are_mixed,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_backend_fails_by_the_promise_that_it_breaks(fault: type, tmp_path: Path) -> None:
    record = BackendPlugin(config=NoSettings, hooks=f"{Path(__file__).stem}:{fault.__name__}")
    test = FAULTS[fault]
    with pytest.raises(Exception) as caught:
        test(BackendConformance(), Problems(record, tmp_path), "default", 1)
    (note,) = caught.value.__notes__
    assert note.startswith("broken promise: ")
    assert note.endswith(f"; see docs/{test.documented}")  # type: ignore[attr-defined]


def test_a_run_that_failed_fails_the_first_test_and_is_named_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def run(self, *arguments: Any) -> None:
            raise RankFailure("a long traceback", "rank 1: RuntimeError: no memory")

    monkeypatch.setattr(backend_conformance, "shared", lambda ranks: Failing())
    record = BackendPlugin(config=NoSettings, hooks="rlhf_devkit.plain:PlainBackend")
    problems = Problems(record, tmp_path)
    with pytest.raises(RankFailure, match="a long traceback"):
        problems.seen("default", 2)
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception) as error:
            problems.seen("default", 2)
        assert str(error.value) == (
            "the run 'default, 2 ranks, seen' failed in test_a_run_that_failed_fails_the_first_"
            "test_and_is_named_in_the_others: rank 1: RuntimeError: no memory"
        )


BROKEN_KITS = """
from rlhf_devkit import ObserverConformance, TrainerConformance

class TestTrainer(TrainerConformance):
    trainer = "sft"
    words = ("--no.such", "1")

    def test_finally(self, bench): ...

class TestObserver(ObserverConformance):
    observer = "tensorboard"

    def test_finally(self, runs): ...
"""


def test_a_set_up_that_failed_fails_one_test_and_is_named_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short_run(*arguments: Any) -> Any:
        raise OSError("no room")

    file = tmp_path / "test_broken.py"
    file.write_text(BROKEN_KITS)
    monkeypatch.setattr(tiny, "short_run", short_run)
    words = [str(file), "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    words += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    chosen = ["-k", "means_something or memory_of or in_order or changes_nothing or finally"]
    # A process of its own would import torch once more.
    assert pytest.main([*words, *chosen]) == pytest.ExitCode.TESTS_FAILED
    output = capsys.readouterr().out
    assert " 6 errors in " in output, output
    for test, cause in (
        ("test_the_curve_means_something", "RLHFError: no: unknown setting"),
        ("test_it_changes_nothing", "OSError: no room"),
    ):
        named = f"the set-up of the tests failed in {test}: {cause}"
        assert output.count(f"\n{named}") == 2, output


class InThisProcess:
    """One rank, without a process of its own."""

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        return [function(*arguments)]


def problems_of(fault: type, folder: Path, patch: pytest.MonkeyPatch) -> Problems:
    """Return the runs of a backend of this file, made in this process."""
    for module in (backend_conformance, bench):
        patch.setattr(module, "shared", lambda ranks: InThisProcess())
    patch.setenv("RLHF_CACHE", str(folder / "cache"))
    record = BackendPlugin(config=NoSettings, hooks=f"{Path(__file__).stem}:{fault.__name__}")
    return Problems(record, folder)


RUN = BackendConformance.test_a_run_of_a_trainer_is_that_of_plain_torch
STEPS = BackendConformance.test_each_rank_has_its_place


@pytest.mark.parametrize(
    ("fault", "is_seen_in_steps"),
    [
        (PreparesWhatItLoaded, True),
        (OptimizesWhatItLoaded, True),
        (NeedsContext, True),
        (WholeAfterForward, True),
        (LoadsEverything, False),
        (OneOptimizer, False),
    ],
)
def test_a_backend_that_no_run_can_start_fails(
    fault: type, is_seen_in_steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = problems_of(fault, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, AttributeError)):
        RUN(BackendConformance(), problems, "default", 1)
    if is_seen_in_steps:
        with pytest.raises((AssertionError, AttributeError)):
            STEPS(BackendConformance(), problems.seen("default", 1), 1)


def test_a_sound_backend_with_sharded_weights_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems, kit = problems_of(Sharded, tmp_path, monkeypatch), BackendConformance()
    RUN(kit, problems, "default", 1)
    kit.test_a_run_of_a_trainer_resumes_to_the_last_bit(problems, "default", 1)
    seen = problems.seen("default", 1)
    kit.test_the_steps_are_those_of_plain_torch(problems, seen, "default", 1)


OBSERVERS = """
from rlhf.hookspecs import hookimpl
from rlhf.plugin import ObserverPlugin

class Sound:
    @hookimpl
    def on_step(self, run, step, metrics):
        metrics["loss"] = 0.0

class Raising:
    @hookimpl
    def on_eval(self, run, step, metrics):
        metrics["eval/no_such_metric"]

sound = ObserverPlugin(hooks="odd_observers:Sound")
raising = ObserverPlugin(hooks="odd_observers:Raising")
"""


@pytest.fixture
def _observers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with observers, sound ones and others."""
    info = tmp_path / "site" / "odd_observers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: odd-observers\nVersion: 1.0\n")
    entries = "".join(f"odd_{name} = odd_observers:{name}\n" for name in ("sound", "raising"))
    (info / "entry_points.txt").write_text(f"[rlhf.observers]\n{entries}")
    (info.parent / "odd_observers.py").write_text(OBSERVERS)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(info.parent))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("odd_observers", None)


@pytest.mark.usefixtures("_observers")
def test_an_observer_that_raises_fails_and_a_sound_one_passes(tmp_path: Path) -> None:
    def watched(name: str) -> tuple[ObserverConformance, Watched]:
        kit = type("Kit", (ObserverConformance,), {"observer": name})
        (tmp_path / name).mkdir()
        return kit(), watched_by(kit, tmp_path / name)

    kit, runs = watched("odd_sound")
    kit.test_it_does_not_raise(runs)
    kit.test_it_is_called_in_order(runs)
    kit.test_it_changes_nothing(runs)
    kit, runs = watched("odd_raising")
    with pytest.raises(AssertionError, match="KeyError: 'eval/no_such_metric'") as caught:
        kit.test_it_does_not_raise(runs)
    assert caught.value.__notes__ == [
        "broken promise: an observer does not raise; see docs/testing.md, Observers"
    ]


@pytest.mark.skipif(not DOCS.is_dir(), reason="the pages are not here")
@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.__name__)
def test_every_promise_is_documented_under_its_heading(kit: type) -> None:
    tests = [value for name, value in vars(kit).items() if name.startswith("test_")]
    for test in tests:
        page, _, heading = test.documented.partition(", ")
        pattern = rf"^#+ .*{re.escape(heading)}"
        assert re.search(pattern, (DOCS / page).read_text(), re.MULTILINE), test.documented
