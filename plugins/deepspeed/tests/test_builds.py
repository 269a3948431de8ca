"""Builds of operators: one that was killed holds up no later one, and no other is disturbed. What
torch does around its lock is done here with a build that only writes down when it ran."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from threading import Timer

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton
from uneven import case_of

from rlhf.engine import Mesh
from rlhf_devkit.forked import Forked
from rlhf_devkit.problem import start
from rlhf_plugin_deepspeed import builds, diagnosis
from rlhf_plugin_deepspeed.backend import DeepSpeedBackend


def build(folder, seconds, rank, output):
    """As torch.utils.cpp_extension does with the compilers and the library."""
    os.environ["LOCAL_RANK"] = rank
    builds.PATIENCE, builds.PAUSE = 0.3, 0.05
    with output.open("w") as file, redirect_stdout(file), builds.watched_builds():
        baton = FileBaton(str(folder / "lock"))
        if baton.try_acquire():
            try:
                began = time.time()
                if not (folder / "library").exists():
                    time.sleep(seconds)
                (folder / "library").touch()
                with (folder / "ran").open("a") as ran:
                    ran.write(json.dumps([began, time.time()]) + "\n")
            finally:
                baton.release()
        else:
            baton.wait()
        assert (folder / "library").exists()


REMOVED = "operator   removed {}, left by a build that was killed\n"


def building(folder, seconds=0.0, rank="0"):
    """Start a build in a process of its own."""
    number = len(list(folder.glob("output-*")))
    output = folder / f"output-{number}"
    output.touch()
    words = [__file__, str(folder), str(seconds), rank, str(output)]
    return Forked(*words, environment=os.environ), output


def text_of(started):
    process, output = started
    _, errors = process.communicate(60)
    assert process.returncode == 0, errors
    return output.read_text()


def kill(started):
    process, _ = started
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for(path, text=""):
    deadline = time.monotonic() + 60
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_lock_of_a_build_that_was_killed_is_removed(tmp_path):
    killed = building(tmp_path, 60)
    wait_for(tmp_path / "lock")
    kill(killed)
    assert (tmp_path / "lock").exists()
    assert text_of(building(tmp_path)) == REMOVED.format(tmp_path / "lock")
    assert (tmp_path / "library").exists()
    assert not (tmp_path / "lock").exists()


def test_a_build_that_runs_is_waited_for_and_taken_over_when_it_is_killed(tmp_path):
    first = building(tmp_path, 60)
    wait_for(tmp_path / "lock")
    others = [building(tmp_path), building(tmp_path, rank="1")]
    wait_for(others[0][1], "waiting")
    assert all(process.poll() is None for process, _ in others)
    kill(first)
    texts = [text_of(each) for each in others]
    waiting = f"operator   waiting for another build in {tmp_path}, which has the lock "
    assert texts[0].startswith(f"{waiting}{tmp_path / 'lock'}\n")
    assert "waiting" not in texts[1]
    assert "".join(texts).count("removed") == 1


def test_ranks_that_find_an_old_lock_together_build_one_after_the_other(tmp_path):
    (tmp_path / "lock").touch()
    texts = [text_of(each) for each in [building(tmp_path, 0.3) for _ in range(6)]]
    assert "".join(texts).count("removed") == 1
    ran = sorted(json.loads(line) for line in (tmp_path / "ran").read_text().splitlines())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ran))


def test_a_compiler_that_outlived_its_build_is_waited_for(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    assert builds.owner_of(lock) == "none"
    compiler = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
    try:
        assert builds.owner_of(lock) == "here"
    finally:
        compiler.kill()
        compiler.wait()
    assert builds.owner_of(lock) == "none"


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.setattr(builds, "file_system", lambda folder: "nfs4")
    monkeypatch.setattr(builds, "PATIENCE", 0.2)


def test_a_lock_that_another_host_may_hold_is_kept_and_named(shared, tmp_path, capsys):
    lock = tmp_path / "lock"
    lock.touch()
    Timer(1.0, lock.unlink).start()
    with builds.watched_builds():
        baton = FileBaton(str(lock))
        # Nobody has built: the lock was deleted by hand.
        assert baton.try_acquire()
        baton.release()
    assert capsys.readouterr().out == (
        f"operator   waiting for the lock {lock} of another build, perhaps on another host; if "
        f"none is running, one was killed: rm {lock}\n"
    )


def test_doctor_names_old_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()

    def found():
        return [each for each in diagnosis.diagnose() if each.subject == "operators"]

    assert found() == []
    with lock.open("w"):
        assert found() == []
    (old,) = found()
    assert (old.state, old.remedy) == ("optional", f"rm {lock}")
    assert old.here == f"{lock} was left by a build that was killed"
    monkeypatch.setattr(builds, "file_system", lambda folder: "nfs4")
    (old,) = found()
    assert old.here == f"{lock} is of a build that may have been killed"
    assert old.remedy == f"if no build is running: rm {lock}"


def watched():
    """Whether a run watches the builds of its process, and whether it still does so afterwards."""
    own = FileBaton.try_acquire
    backend = DeepSpeedBackend()
    start(backend, case_of({"stage": 0}))
    during = FileBaton.try_acquire is not own
    backend.close_mesh(Mesh())
    return during, FileBaton.try_acquire is not own


def test_a_run_watches_the_builds_of_its_process(single):
    assert single.run(watched) == [(True, False)]


def test_torch_builds_with_this_lock():
    source = inspect.getsource(cpp_extension)
    assert "baton = FileBaton(os.path.join(build_directory, 'lock'))" in source
    assert "if baton.try_acquire():" in source


if __name__ == "__main__":
    place, took, own_rank, text = sys.argv[1:]
    build(Path(place), float(took), own_rank, Path(text))
