"""Observers that hang, are slow or start late: they do not hold a run, and lose no call if they
return."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rlhf.config.sections import Config
from rlhf.hookspecs import RunRecord, hookimpl
from rlhf.registry import observers as limits
from rlhf.registry.observers import ObserverGateway, ObserverThread
from rlhf.request.reader import read_config
from rlhf.train.rank import run_rank
from rlhf_devkit.bench import LIKELIHOOD
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend
from rlhf_devkit.tiny import short_run

RUN = RunRecord(name="toy", folder=Path("nowhere"), config=Config(), steps=3)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("on_start", {}),
    ("on_step", {"step": 1, "metrics": {"loss": 1.0}}),
    ("on_eval", {"step": 1, "metrics": {"eval/loss": 1.0}}),
    ("on_samples", {"step": 1, "samples": []}),
    ("on_checkpoint", {"step": 1, "directory": Path("step-000001")}),
    ("on_step", {"step": 2, "metrics": {"loss": 0.5}}),
    ("on_finish", {"error": None}),
]
HOOKS = [hook for hook, _ in CALLS]


class Observer:
    """Notes its calls with their threads, and does something in one hook, or in each of them."""

    def __init__(self, hook: str = "", act: Callable[[], object] = lambda: None) -> None:
        self.heard: list[str] = []
        self.threads: set[threading.Thread] = set()
        self._hook, self._act = hook, act

    def _hear(self, hook: str) -> None:
        self.threads.add(threading.current_thread())
        if self._hook in (hook, "each"):
            self._act()
        self.heard.append(hook)

    @hookimpl
    def on_start(self) -> None:
        self._hear("on_start")

    @hookimpl
    def on_step(self) -> None:
        self._hear("on_step")

    @hookimpl
    def on_eval(self) -> None:
        self._hear("on_eval")

    @hookimpl
    def on_samples(self) -> None:
        self._hear("on_samples")

    @hookimpl
    def on_checkpoint(self) -> None:
        self._hear("on_checkpoint")

    @hookimpl
    def on_finish(self) -> None:
        self._hear("on_finish")


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LIMIT": 0.2, "BRIEF": 0.1, "LAST": 0.3, "LAST_BRIEF": 0.3}.items():
        monkeypatch.setattr(limits, name, seconds)


@pytest.fixture
def release() -> Any:
    """An event for which observers wait, so that none hangs after its test."""
    event = threading.Event()
    yield event
    event.set()


def gateway(**observers: object) -> ObserverGateway:
    return build_gateways(PlainBackend(), observers=observers)[1]


def call_all(observers: ObserverGateway, run: RunRecord) -> float:
    """Call every hook as a run does; returns the seconds that it took."""
    began = time.monotonic()
    for hook, arguments in CALLS:
        getattr(observers, hook)(run=run, **arguments)
    return time.monotonic() - began


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return attrs.evolve(RUN, folder=tmp_path)


@pytest.mark.parametrize("hook", [*dict.fromkeys(HOOKS)])
def test_an_observer_that_hangs_does_not_hold_the_run_and_others_hear_all(
    run: RunRecord, hook: str, release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging, other = Observer(hook, release.wait), Observer()
    took = call_all(gateway(web=hanging, ear=other), run)
    assert took < 10
    assert other.heard == HOOKS
    assert hanging.heard == HOOKS[: HOOKS.index(hook)]
    file = run.folder / "errors" / "observer-web.txt"
    lost = len(HOOKS) - HOOKS.index(hook)
    calls = "1 call" if lost == 1 else f"{lost} calls"
    lines = capsys.readouterr().err.splitlines()
    assert lines.pop() == (
        f"warning: observer 'web' has not returned from {hook}; the run ends without it, and "
        f"{calls} did not get through; see {file}"
    )
    late = (
        f"warning: observer 'web' has not returned from {hook} for 0 s; the run continues, and the "
        "observer gets its other calls when it returns"
    )
    assert lines == [late] * (hook != "on_finish")
    assert "in _hear" in file.read_text()


def test_an_observer_that_hangs_in_a_call_of_c_or_when_it_is_created_is_the_same(
    run: RunRecord, release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()

    def make() -> object:
        release.wait()
        return Observer()

    reading = Observer("on_step", lambda: os.read(reader, 1))
    assert call_all(ObserverGateway({"made": make, "pipe": lambda: reading}), run) < 10
    os.close(writer)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0].removeprefix("warning: ") for line in lines] == [
        "observer 'made' has not returned from __init__ for 0 s",
        "observer 'pipe' has not returned from on_step for 0 s",
        "observer 'made' has not returned from __init__",
        "observer 'pipe' has not returned from on_step",
    ]
    os.close(reader)


def test_several_observers_that_hang_hold_the_run_for_one_limit(
    run: RunRecord, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LIMIT", 1.0)
    hanging = {f"web{number}": Observer("on_start", release.wait) for number in range(5)}
    began = time.monotonic()
    gateway(**hanging).on_start(run=run)
    assert 0.9 < time.monotonic() - began < 4


def test_an_observer_that_starts_late_gets_every_call_in_order_and_one_thread(
    run: RunRecord,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LAST", 30.0)
    late = Observer("on_start", release.wait)
    late.remedy = "look at the network"  # type: ignore[attr-defined]
    observers = gateway(web=late)
    for hook, arguments in CALLS:
        getattr(observers, hook)(run=run, **arguments)
        if hook == "on_samples":
            release.set()
    assert late.heard == HOOKS
    assert len(late.threads) == 1
    assert capsys.readouterr().err == (
        "warning: observer 'web' has not returned from on_start for 0 s; the run continues, and "
        "the observer gets its other calls when it returns; look at the network\n"
    )
    assert not (run.folder / "errors").exists()


def test_a_slow_observer_is_waited_for_and_its_thread_ends_with_the_run(
    run: RunRecord, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LIMIT", "LAST"):
        monkeypatch.setattr(limits, name, 30.0)
    slow = Observer("each", lambda: time.sleep(0.05))
    observers = gateway(web=slow)
    for number, (hook, arguments) in enumerate(CALLS, start=1):
        getattr(observers, hook)(run=run, **arguments)
        assert slow.heard == HOOKS[:number]
    (thread,) = slow.threads
    assert thread is not threading.current_thread()
    thread.join(10)
    assert not thread.is_alive()
    assert capsys.readouterr().err == ""


def test_an_observer_that_was_late_is_waited_for_briefly(
    run: RunRecord,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observers = gateway(web=Observer("each", release.wait))
    observers.on_start(run=run)
    monkeypatch.setattr(limits, "LIMIT", 30.0)
    began = time.monotonic()
    observers.on_step(run=run, step=1, metrics={})
    observers.on_step(run=run, step=2, metrics={})
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err.count("warning") == 1


def test_an_observer_that_raises_after_a_late_call_is_dropped_then(
    run: RunRecord,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LAST", 30.0)

    def fail() -> None:
        release.wait()
        raise ConnectionError("no route to host")

    observer = Observer("on_start", fail)
    observers = gateway(web=observer)
    observers.on_start(run=run)
    release.set()
    observers.on_finish(run=run, error=None)
    assert observer.heard == []
    first, second = capsys.readouterr().err.splitlines()
    assert "has not returned from on_start" in first
    assert second == (
        "warning: observer 'web' failed in on_start and is not called again: ConnectionError: no "
        f"route to host; see {run.folder / 'errors' / 'observer-web.txt'}"
    )


def test_an_observer_that_cannot_be_created_is_dropped(
    run: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> object:
        raise ConnectionError("no route to host")

    call_all(ObserverGateway({"web": make}), run)
    assert capsys.readouterr().err == (
        "warning: observer 'web' failed in __init__ and is not called again: ConnectionError: no "
        f"route to host; see {run.folder / 'errors' / 'observer-web.txt'}\n"
    )


def test_system_exit_after_a_late_call_ends_the_run_at_the_next_one(run: RunRecord) -> None:
    def leave() -> None:
        time.sleep(0.3)
        raise SystemExit(3)

    observers = gateway(web=Observer("on_step", leave))
    observers.on_step(run=run, step=1, metrics={})
    time.sleep(0.3)
    with pytest.raises(SystemExit) as caught:
        observers.on_eval(run=run, step=1, metrics={})
    assert caught.value.code == 3


def test_an_observer_that_is_too_far_behind_is_dropped(
    run: RunRecord,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MOST_WAITING", 3)
    observers = gateway(web=Observer("on_step", release.wait))
    for step in range(10):
        observers.on_step(run=run, step=step, metrics={})
    _, line = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: observer 'web' is 3 calls behind in on_step and is not called again; see "
        f"{run.folder / 'errors' / 'observer-web.txt'}"
    )


def test_python_waits_for_the_threads_that_an_observer_starts(run: RunRecord) -> None:
    made: list[threading.Thread] = []
    observer = Observer("on_finish", lambda: made.append(threading.Thread()))
    call_all(gateway(web=observer), run)
    assert [thread.daemon for thread in made] == [False]


@pytest.mark.usefixtures("cache")
def test_a_signal_during_a_call_is_heard_at_once(
    tmp_path: Path,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LIMIT", "LAST", "LAST_BRIEF"):
        monkeypatch.setattr(limits, name, 60.0)
    before = signal.getsignal(signal.SIGTERM)
    at_start: list[Any] = []
    signalled: list[float] = []

    def hang() -> None:
        time.sleep(0.3)
        signalled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait()

    named = {
        "start": Observer("on_start", lambda: at_start.append(signal.getsignal(signal.SIGTERM))),
        "web": Observer("on_step", hang),
    }
    words = [*short_run(tmp_path, "demonstration"), "--output", str(tmp_path / "run")]
    request = read_config(LIKELIHOOD, overrides=words)
    _, ended = run_rank(request, backend=PlainBackend(), observers=named)
    assert ended == "signal"
    assert time.monotonic() - signalled[0] < 3.0
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    # Until the observers have started, a signal ends the run: there is nothing to save.
    assert at_start == [before]
    assert capsys.readouterr().err.count("warning: observer 'web'") == 1


def test_a_wait_ends_though_its_time_ends_while_a_signal_is_handled(
    run: RunRecord, release: threading.Event
) -> None:
    thread = ObserverThread("web", lambda: Observer("on_start", release.wait))
    handled: list[float] = []

    def handle(*_: object) -> None:
        assert not handled, "the wait has no end"
        handled.append(time.monotonic())
        time.sleep(0.3)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 5.0)
    try:
        thread.post("on_start", {"run": run})
        assert not thread.has_returned(within=0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert handled


def test_what_is_wrong_is_printed_before_the_run_continues(
    run: RunRecord, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError("no route to host")

    write = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda *given, **more: (time.sleep(0.3), write(*given, **more))
    )
    monkeypatch.setattr(limits, "LIMIT", 30.0)
    gateway(web=Observer("on_start", fail)).on_start(run=run)
    assert "observer 'web' failed in on_start" in capsys.readouterr().err


ENDING = """
import atexit, sys, threading, time
import rlhf.__main__ as script

script.EXIT_SECONDS = script.EXIT_SECONDS_HUNG = 0.2
if sys.argv[1] == "hung":
    script.EXIT_SECONDS = 60.0
    from rlhf.registry.observers import ObserverThread
    from rlhf.hookspecs import hookimpl
    class Hanging:
        @hookimpl
        def on_start(self):
            time.sleep(60)

def main():
    if sys.argv[1] == "hung":
        ObserverThread("web", Hanging).post("on_start", {"run": None})
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=[60]).start()
    else:
        atexit.register(time.sleep, 60)
    print("printed")
    return 143

script.main = main
script.run_process()
"""


@pytest.mark.parametrize("what", ["thread", "function", "hung"])
def test_a_library_that_hangs_at_the_end_does_not_hold_the_process(what: str) -> None:
    command = [sys.executable, "-c", ENDING, what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "printed\n", "")
