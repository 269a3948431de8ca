"""Where ranks are, and the sentence about those that wait for one another."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest

from rlhf.launch import places
from rlhf.launch.local import Ranks
from rlhf.launch.places import Marker, Place

NOW = 1000.0


def at(step: int, phase: str, batch: int = 0, *, ago: float = 0.0) -> Place:
    return Place(step, phase, batch, NOW - ago)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.time, "time", lambda: NOW)


def test_a_marker_writes_the_place_of_its_rank(tmp_path: Path) -> None:
    markers = [Marker(tmp_path / "ranks", rank) for rank in range(2)]
    markers[0].enter("update", step=7)
    markers[1].enter("forward", step=7, batch=3)
    markers[1].enter("backward", batch=3)
    where = places.read(tmp_path / "ranks")
    assert [(rank, str(place), place.step) for rank, place in where.items()] == [
        (0, "update", 7),
        (1, "backward of micro-batch 3", 7),
    ]
    assert places.read(tmp_path / "ranks", since=time.time() + 1) == {}
    (tmp_path / "ranks" / "rank-00002").touch()
    # As if the file were removed between the listing and the reading.
    (tmp_path / "ranks" / "rank-00003").symlink_to(tmp_path / "removed")
    assert [*places.read(tmp_path / "ranks")] == [0, 1]
    for marker in markers:
        marker.close()


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (
            [at(812, "update"), at(812, "backward", 3, ago=34.0)],
            "rank 1 has not entered the update of step 812; last seen in backward of micro-batch "
            "3, 34 s ago",
        ),
        (
            [at(5, "update", ago=9.0), at(6, "forward", 1), at(5, "update", ago=3.0)],
            "ranks 0, 2 have not entered the forward of micro-batch 1 of step 6; last seen in "
            "update of step 5, 3 s ago",
        ),
        (
            [at(6, "forward", 2), at(6, "backward", 1)],
            "rank 1 has not entered the forward of micro-batch 2 of step 6; last seen in backward "
            "of micro-batch 1, 0 s ago",
        ),
        (
            [at(6, "evaluation", 2), at(6, "checkpoint")],
            "rank 0 has not entered the checkpoint of step 6; last seen in evaluation of "
            "micro-batch 2, 0 s ago",
        ),
        (
            [at(1, "data"), at(1, "backward", 4)],
            "rank 0 has not entered the backward of micro-batch 4 of step 1; last seen in data, "
            "0 s ago",
        ),
        ([at(6, "update"), at(6, "update")], "every rank has entered the update of step 6"),
        ([], None),
    ],
)
def test_the_message_names_the_ranks_that_are_waited_for_and_their_places(
    now: None, where: list[Place], sentence: str | None
) -> None:
    assert places.explain(dict(enumerate(where))) == sentence


def test_only_ranks_that_are_silent_wait_for_one_another(now: None) -> None:
    silent = {0: at(6, "update", ago=20.0), 1: at(6, "backward", 2, ago=19.0)}
    assert places.explain_wait(silent, silent_for=10.0) == places.explain(silent)
    assert places.explain_wait(silent, silent_for=60.0) is None
    moving = silent | {1: at(6, "backward", 2)}
    assert places.explain_wait(moving, silent_for=10.0) is None
    # Answers may take long to generate.
    generating = silent | {1: at(6, "rollout", ago=19.0)}
    assert places.explain_wait(generating, silent_for=10.0) is None
    assert places.explain_wait({}, silent_for=10.0) is None


def test_ranks_in_the_same_place_wait_unless_they_are_as_slow_as_before(now: None) -> None:
    together = {rank: at(6, "backward", 1, ago=50.0) for rank in range(2)}
    assert places.explain_wait(together, silent_for=45.0) == places.explain(together)
    assert places.explain_wait({0: together[0]}, silent_for=45.0) is None
    slow = together | {1: attrs.evolve(together[1], longest=26.0)}
    assert places.explain_wait(slow, silent_for=45.0) is None
    compiling = together | {1: attrs.evolve(together[1], has_stepped=False)}
    assert places.explain_wait(compiling, silent_for=45.0) is None
    saving = {rank: at(6, "checkpoint", ago=50.0) for rank in range(2)}
    assert places.explain_wait(saving, silent_for=45.0) is None


def test_a_marker_notes_the_longest_time_in_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(places.time, "time", lambda: clock[0])
    marker = Marker(tmp_path / "ranks", 0)
    for phase, clock[0] in (("forward", 90.0), ("checkpoint", 93.0), ("forward", 200.0)):
        marker.enter(phase)
    assert places.read(tmp_path / "ranks")[0].longest == 3.0
    marker.close()


WAITS = """
import os, signal, sys, time
from pathlib import Path
from rlhf.launch.places import Marker
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = int(os.environ["RANK"])
place = Marker(Path(sys.argv[1]), rank)
place.enter("forward" if rank else "update", step=3, batch=rank)
Path(sys.argv[1], f"up{rank}").write_text("")
time.sleep(60)
"""


def started(folder: Path, then: str) -> Ranks:
    """Two ranks that wait for one another; `then` is evaluated once both are up."""
    command = [sys.executable, "-c", WAITS, str(folder)]
    ranks = Ranks(command, 2, 60.0, grace=0.1, places_in=folder, silence=0.5)

    def act() -> None:
        while len(list(folder.glob("up*"))) < 2:
            time.sleep(0.02)
        if then == "TERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            ranks.processes[1].kill()

    threading.Thread(target=act).start()
    return ranks


def test_a_signal_ends_ranks_that_wait_for_one_another_and_says_for_whom(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert started(tmp_path, "TERM").wait() == 143
    assert capfd.readouterr().err.replace("1 s ago", "0 s ago") == (
        "error: rank 1 has not entered the update of step 3; last seen in forward of micro-batch "
        "1, 0 s ago: the ranks wait for one another, so the run was stopped without saving; "
        "continue from the last checkpoint with --resume\n"
    )


def test_a_rank_that_was_killed_is_shown_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert started(tmp_path, "KILL").wait() == 1
    assert capfd.readouterr().err == (
        "error: rank 1 was killed by SIGKILL in forward of micro-batch 1 of step 3; the other "
        "ranks were stopped\n"
    )
