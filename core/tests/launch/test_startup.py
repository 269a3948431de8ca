"""The start of a run: its clock, its imports, and what is collected."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers  # noqa: F401

from rlhf.engine import Mesh
from rlhf.launch import importing as imports
from rlhf.launch.clock import Clock
from rlhf.launch.garbage import without_collections
from rlhf.launch.importing import importing, opening_device
from rlhf.train.rank import process_group


def test_the_time_of_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    startup = Clock("set-up")
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


def test_the_device_is_opened_beside_the_imports_and_its_errors_appear_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, imported, calls = threading.Event(), threading.Event(), []

    def initialise(flags: int) -> None:
        calls.append("driver")

    def library(name: str) -> Any:
        began.set()
        assert imported.wait(10)
        return SimpleNamespace(cuInit=initialise)

    def device(index: int) -> None:
        calls.append("device")
        raise RuntimeError(f"no device {index}")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(imports, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "device", device)
    threads = threading.active_count()
    with opening_device():
        assert began.wait(10)
        imported.set()
    assert threading.active_count() == threads
    assert calls == ["driver", "device"]


def test_a_machine_without_a_driver_opens_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    calls: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(imports, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "device", calls.append)
    with opening_device():
        pass
    assert not calls


def start(folder: Path, script: str) -> str:
    """Return what a script prints that finds packages in `folder` first."""
    found = os.pathsep.join([str(folder), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": found, "RLHF_CACHE": str(folder / "cache")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


IMPORTS = """
import sys
from rlhf.launch.importing import importing_rank
with importing_rank():
    import rlhf.train.rank
assert not {"scipy", "sklearn", "torchao", "peft"} & {*sys.modules}, "imported"
from transformers import utils
for name in ("scipy", "sklearn", "torchao"):
    assert getattr(utils, f"is_{name}_available")(), f"{name} is taken for missing"
import scipy, sklearn, torchao
"""


def test_a_rank_imports_no_library_that_its_run_does_not_use(tmp_path: Path) -> None:
    for name in ("scipy", "sklearn", "torchao"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("__version__ = '99'\n")
    start(tmp_path, IMPORTS)


def test_collections_continue_after_a_failure() -> None:
    enabled: list[bool] = []

    @without_collections()
    def fail() -> None:
        enabled.append(gc.isenabled())
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert enabled == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Model:
    """What an earlier run has left."""

    def __init__(self) -> None:
        self.itself = self


def test_models_of_an_earlier_run_leave_the_device_before_the_next_ones_are_loaded() -> None:
    hooks: Any = SimpleNamespace(
        setup_mesh=lambda config: Mesh(device=torch.device("cuda")),
        close_mesh=lambda mesh: True,
    )
    config: Any = None
    gc.disable()
    try:
        left = weakref.ref(Model())
        assert left() is not None
        with process_group(config, hooks):
            assert left() is None
    finally:
        gc.enable()
