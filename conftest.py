"""What holds for every test of the workspace."""

import atexit
import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from rlhf.launch.garbage import without_collections
from rlhf_devkit.ranks import close_shared, port_fixture

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter then runs kernels on the host.
    os.environ["TRITON_INTERPRET"] = "1"

# A defect of ours in a rehearsal must not pass for a model that needs values.
os.environ["RLHF_STRICT_REHEARSAL"] = "1"

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_KILLED = ("pymp-", "torchelastic_", "wandb-", "wandb_")
"""What multiprocessing, torchrun and wandb leave if a process is killed."""
OF_WANDB = ("wandb-media", "wandb-artifacts")
"""Folders that wandb removes when its process ends."""
STARTED = time.monotonic()
TEMPORARY = pytest.StashKey[Path]()
"""The folder in which all processes of the session make their temporary files."""


@pytest.fixture(autouse=True)
def _no_rank_left_behind() -> Iterator[None]:
    """A test that makes this process look like a rank would break the runs of later tests."""
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    yield
    assert {name: os.environ.get(name) for name in RENDEZVOUS} == before


port = port_fixture()


def pytest_addoption(parser: pytest.Parser) -> None:
    """For a part of the matrix: `.ci/run` has no time for all of it."""
    parser.addoption("--minutes", type=float, help="skip the tests that would begin later")
    parser.addoption("--first", type=int, default=0, help="number of the file that is the first")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a temporary folder of its own; caches and pytest's folders stay outside."""
    if hasattr(config, "workerinput"):  # A worker of pytest-xdist inherits the folder.
        return
    system = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", system)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(system) / "torchinductor_tests"))
    config.stash[TEMPORARY] = Path(tempfile.mkdtemp(prefix="rlhf-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(config.stash[TEMPORARY])


WHOLE_KITS = {"TestDPO", "TestGRPO"}
"""The trainers, one of them with a rollout, whose kit `make test` runs whole."""
OF_WHOLE_KITS = {
    "test_the_curve_on_one_rank_is_that_of_plain_torch",
    "test_a_run_in_another_precision_begins_like_that_in_fp32",
    "test_ranks_sample_together_though_answers_end_at_different_lengths",
}
"""Tests of the kit that prove less of a trainer than of what runs it."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after `--minutes`."""
    minutes = item.config.option.minutes
    if minutes and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark these tests as `matrix` in the kits of the other trainers, and begin with the file
    `--first`, which those before it follow."""
    files = list(dict.fromkeys(item.path for item in items))
    first = config.option.first % (len(files) or 1)
    place = {file: number for number, file in enumerate(files[first:] + files[:first])}
    items.sort(key=lambda item: place[item.path])
    for item in items:
        kit = getattr(item, "cls", None)
        name = getattr(item, "originalname", "")
        if kit and kit.__name__ not in WHOLE_KITS and name in OF_WHOLE_KITS:
            item.add_marker(pytest.mark.matrix)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Import the tests without collecting garbage, which takes a quarter of the time, and exclude
    what exists then from later collections."""
    with without_collections():
        result = yield
    gc.freeze()
    atexit.register(gc.unfreeze)  # Some bindings report what is not collected as leaks.
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With `--durations`, print the seconds that each file took."""
    if terminalreporter.config.option.durations is None:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for file, took in seconds.most_common():
        terminalreporter.write_line(f"{took:8.1f}  {file}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f}  together")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Fail the session if a test left a temporary file behind."""
    close_shared()
    util._run_finalizers()  # Of multiprocessing, whose folder is in the session's.
    yield
    folder = session.config.stash.get(TEMPORARY, None)
    if folder is None:
        return
    names = sorted(path.name for path in folder.iterdir())
    left = [
        name for name in names if not name.startswith(OF_KILLED) and not name.endswith(OF_WANDB)
    ]
    if left:
        print(f"\ntests left temporary files: {', '.join(left)}")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(folder, ignore_errors=True)
