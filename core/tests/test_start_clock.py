"""The clock of a run's start."""

import time

import pytest

from rlhf.launch.startup import Startup


def test_the_time_of_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    startup = Startup()
    with startup.part("loading"), startup.part("probe"):
        pass
    startup.enter("first step")
    startup.enter("steps")
    assert startup.seconds == {"set-up": 17.0, "loading": 10.0, "probe": 4.0, "first step": 32.0}
