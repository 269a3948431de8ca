"""The tests that every observer must pass, as a class to subclass in a test file.

    class TestMine(ObserverConformance):
        observer = "mine"

They make three runs of four steps in plain torch: without the observer, with it, and with it
stopped and resumed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import define, field

from rlhf.config.field_docs import documented
from rlhf.hookspecs import RunRecord, hookimpl
from rlhf.registry.gateway import check_hooks, makers_of
from rlhf.registry.observers import ObserverGateway
from rlhf.request.reader import read_config
from rlhf_devkit import tiny
from rlhf_devkit.bench import LIKELIHOOD, Bench
from rlhf_devkit.curves import Metrics, weights, without_timings
from rlhf_devkit.once import Once
from rlhf_devkit.promises import promise

EVENTS = [
    ("start",), ("eval", 0), ("samples", 0), ("step", 1), ("step", 2), ("eval", 2), ("samples", 2),
    ("checkpoint", 2), ("step", 3), ("step", 4), ("checkpoint", 4), ("eval", 4), ("samples", 4),
    ("finish", None),
]  # fmt: skip
"""What happens in a run of four steps with an evaluation, samples and a checkpoint after every
second. After the last step, the run saves before it evaluates."""


class Recorder:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    @hookimpl
    def on_start(self, run: RunRecord) -> None:
        self.events.append(("start",))

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("step", step))

    @hookimpl
    def on_eval(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("eval", step))

    @hookimpl
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.events.append(("samples", step))

    @hookimpl
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        self.events.append(("checkpoint", step))

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        self.events.append(("finish", error))


@define
class Watched:
    """The runs of one observer's tests."""

    observer: str
    words: Sequence[str]
    """More words for the runs with the observer."""
    bench: Bench
    recorder: Recorder = field(factory=Recorder)

    @property
    def observed(self) -> list[str]:
        """The words of a run with the observer."""
        return ["--observers", f"[{self.observer}]", *self.words]

    def alone(self) -> Metrics:
        """Return the metrics of a run without the observer."""
        return self.bench.plain()

    def watched(self) -> Metrics:
        """Return the metrics of a run with it; the recorder watches that run too."""
        return self.bench.plain("watched", *self.observed, observers={"the kit": self.recorder})

    def resumed(self) -> Metrics:
        """Return the metrics of a run with it that is stopped and resumed."""
        self.bench.plain("stopped", *self.observed, "--train.stop_at", "2", to="resumed")
        return self.bench.plain("resumed", *self.observed, "--resume")

    def failure(self, name: str) -> str:
        """Return the traceback of what the observer raised in that run, or ""."""
        file = self.bench.folder / name / "errors" / f"observer-{self.observer}.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def record(self, name: str) -> RunRecord:
        """Return the record of a run in an empty folder."""
        folder = self.bench.folder / name
        folder.mkdir(exist_ok=True)
        words = [*self.bench.words, *self.observed, "--output", str(folder)]
        config = read_config(LIKELIHOOD, overrides=words).config
        return RunRecord(name="likelihood", folder=folder, config=config, steps=4, id=name)


@documented
class ObserverConformance:
    """The tests. A subclass names its observer."""

    observer: ClassVar[str]
    """Name of the observer: that of its entry point."""
    words: ClassVar[Sequence[str]] = ()
    """More words for the command line of the runs with the observer."""

    @pytest.fixture(scope="class")
    @classmethod
    def once(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Once, Path]]:
        """What the tests of the class share, and its folder."""
        folder = tmp_path_factory.mktemp(f"observer-{cls.observer}")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RLHF_CACHE", str(folder / "cache"))
            yield Once(), folder

    @pytest.fixture
    def runs(self, once: tuple[Once, Path]) -> Watched:
        """The runs of the class."""
        shared, folder = once
        return shared.get("the set-up of the tests", lambda: watched_by(type(self), folder))

    @promise("an observer implements hooks of observers", "hooks.md, Observer hooks")
    def test_it_has_hooks(self) -> None:
        plugin = self._made()
        assert check_hooks("observer", plugin), f"{self.observer} has no method @hookimpl"

    @promise("an observer does not raise", "testing.md, Observers")
    def test_it_does_not_raise(self, runs: Watched) -> None:
        runs.watched()
        assert not runs.failure("watched"), runs.failure("watched")

    @promise("an observer changes nothing in a run", "hooks.md, Observer hooks")
    def test_it_changes_nothing(self, runs: Watched) -> None:
        assert without_timings(runs.watched()) == without_timings(runs.alone())
        folder = runs.bench.folder
        same = weights(folder / "watched") == weights(folder / "plain")
        assert same, "the exported weights differ"

    @promise("observers are called in the order of the run", "hooks.md, Observer hooks")
    def test_it_is_called_in_order(self, runs: Watched) -> None:
        runs.watched()
        assert runs.recorder.events == EVENTS

    @promise("an observer continues in a resumed run", "testing.md, Observers")
    def test_it_watches_a_resumed_run(self, runs: Watched) -> None:
        assert without_timings(runs.resumed())[-1] == without_timings(runs.alone())[-1]
        assert not runs.failure("resumed"), runs.failure("resumed")

    @promise("an observer takes any metrics and a failed run", "testing.md, Observers")
    def test_it_takes_any_metrics_and_a_failed_run(self, runs: Watched) -> None:
        run, gateway = runs.record("failed"), ObserverGateway({self.observer: self._made})
        gateway.on_start(run=run)
        gateway.on_step(run=run, step=1, metrics={"loss": math.nan, "grad_norm": math.inf})
        gateway.on_step(run=run, step=2, metrics={"loss": 1.0})
        gateway.on_finish(run=run, error=RuntimeError("a device was lost"))
        assert not runs.failure("failed"), runs.failure("failed")

    def _made(self) -> object:
        """Return the observer with the settings of `words`."""
        observed = ["--observers", f"[{self.observer}]", *self.words]
        config = read_config(LIKELIHOOD, overrides=observed, inputs=False).config
        section = config.observers.by_name[self.observer]
        return makers_of("observer", {self.observer: section})[self.observer]()


def watched_by(kit: type[ObserverConformance], folder: Path) -> Watched:
    """Return the runs of a subclass, with their inputs in the empty `folder`."""
    words = tiny.short_run(folder, "demonstration")
    words += ["--train.eval_every", "2", "--train.eval_at_start", "true"]
    words += ["--checkpoint.every", "2", "--train.samples", "2"]
    bench = Bench(LIKELIHOOD, "likelihood", folder, words, str(folder / "cache"))
    return Watched(kit.observer, kit.words, bench)
