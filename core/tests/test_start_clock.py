"""The clock of a run's start."""

import gc
import sys
import time

import pytest
import transformers  # noqa: F401

from rlhf.launch.startup import Startup, importing


def test_the_time_of_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    startup = Startup()
    with startup.part("loading"), startup.part("probe"):
        pass
    startup.enter("first step")
    startup.enter("steps")
    assert startup.seconds == {"set-up": 17.0, "loading": 10.0, "probe": 4.0, "first step": 32.0}


def test_only_the_first_import_of_transformers_excludes_objects_from_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.unfreeze()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with importing():
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()
