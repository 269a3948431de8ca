"""The launcher's promises: exit codes, SIGTERM, a save that takes too long, a parent that is
killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhf.errors import RLHFError
from rlhf.launch.hosts import join_slurm
from rlhf.launch.local import Ranks
from rlhf.launch.signals import FOLDER, PARENT

STOPPED_LINE = (
    "stopped before or after training steps; continue with --resume, or start again if there is no "
    "run folder\n"
)
OK = "pass"
FAILS_ON_RANK_1 = (
    "import os, sys, time; sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(60)"
)
SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(143)))
open(sys.argv[1], "a").write("x")
time.sleep(60)
"""
STARTS = """
import sys, time
open(sys.argv[1], "a").write("x")
time.sleep(60)
"""
NEVER_SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write("x")
time.sleep(60)
"""


def ranks(code: str, *arguments: str, patience: float = 10.0) -> Ranks:
    return Ranks([sys.executable, "-c", code, *arguments], 2, patience, grace=0.5)


def terminate_once_both_wrote(path: Path) -> None:
    while not path.exists() or len(path.read_text()) < 2:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def test_ranks_that_all_succeed_give_zero() -> None:
    assert ranks(OK).wait() == 0


def test_the_first_rank_that_fails_ends_the_others_with_its_code() -> None:
    started = ranks(FAILS_ON_RANK_1)
    assert started.wait() == 2
    assert all(process.poll() is not None for process in started.processes)


def test_sigterm_reaches_every_rank_and_gives_143(tmp_path: Path) -> None:
    started = ranks(SAVES, str(tmp_path / "up"))
    threading.Thread(target=terminate_once_both_wrote, args=[tmp_path / "up"]).start()
    assert started.wait() == 143


def test_sigterm_while_the_ranks_still_start_is_143_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = ranks(STARTS, str(tmp_path / "up"))
    threading.Thread(target=terminate_once_both_wrote, args=[tmp_path / "up"]).start()
    assert started.wait() == 143
    out, err = capfd.readouterr()
    assert (out, err) == (STOPPED_LINE, "")


def test_a_save_longer_than_the_stop_timeout_is_ended_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = ranks(NEVER_SAVES, str(tmp_path / "up"), patience=0.5)
    threading.Thread(target=terminate_once_both_wrote, args=[tmp_path / "up"]).start()
    assert started.wait() == 143
    assert capfd.readouterr().err == (
        "error: the stopped run did not save within 0.5 s; raise checkpoint.stop_timeout\n"
    )


def test_another_stop_signal_while_the_ranks_still_start_is_143_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path / "up")]
    started = Ranks(command, 2, 10.0, grace=0.5, signals=("USR1", "TERM"))
    threading.Thread(target=terminate_once_both_wrote, args=[tmp_path / "up"]).start()
    assert started.wait() == 143
    assert capfd.readouterr() == (STOPPED_LINE, "")


STOPS_ITSELF = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(143)
time.sleep(60)
"""


def test_a_signal_to_one_rank_before_the_steps_stops_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert ranks(STOPS_ITSELF).wait() == 143
    assert capfd.readouterr() == (STOPPED_LINE, "")


FAILS = """
import os, sys
from rlhf.commands import main
from rlhf.errors import RLHFError
def fail(words):
    raise RLHFError(sys.argv[1] or f"no device {os.environ['RANK']}")
main.act = fail
sys.exit(main.main(["run"]))
"""


def test_an_error_that_all_ranks_have_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    problem = "set x (a.b) to 2\n  or 3"
    started = Ranks([sys.executable, "-c", FAILS, problem], 2, 10.0)
    assert (started.wait(), started.problem()) == (2, "set x (a.b) to 2")
    assert re.fullmatch(rf"error(?: on rank 1)?: {re.escape(problem)}\n", capfd.readouterr().err)


def test_every_rank_prints_an_error_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    started = Ranks([sys.executable, "-c", FAILS, ""], 2, 10.0)
    assert (started.wait(), started.problem()[:-1]) == (2, "no device ")
    lines = ["error on rank 1: no device 1", "error: no device 0"]
    assert sorted(capfd.readouterr().err.splitlines()) == lines


def test_ranks_get_the_variables_of_their_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", f"import os; print(os.environ['{FOLDER}'])"]
    assert Ranks(command, 2, 10.0, variables={FOLDER: "runs/sft-1"}).wait() == 0
    assert capfd.readouterr().out == "runs/sft-1\n" * 2


WAITS = """
import pathlib, sys
from rlhf.launch.local import wait_at_gate
wait_at_gate()
print(pathlib.Path(sys.argv[1]).read_text())
"""


def test_ranks_wait_until_the_run_is_prepared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, command = tmp_path / "file", [sys.executable, "-c", WAITS, str(tmp_path / "file")]
    started = Ranks(command, 2, 10.0, prepare=lambda: file.write_text("prepared"))
    assert started.wait() == 0
    assert capfd.readouterr().out == "prepared\n" * 2


def test_a_run_that_cannot_be_prepared_leaves_no_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RLHFError("no rows")

    with pytest.raises(RLHFError, match="no rows"):
        Ranks([sys.executable, "-c", WAITS, str(tmp_path / "file")], 2, 10.0, prepare=fail)
    assert capfd.readouterr() == ("", "")


def test_a_signal_ends_the_preparation(capfd: pytest.CaptureFixture[str]) -> None:
    def prepare() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    began = time.monotonic()
    started = Ranks([sys.executable, "-c", WAITS], 2, 10.0, prepare=prepare)
    assert started.wait() == 143
    assert time.monotonic() - began < 50
    assert capfd.readouterr() == (STOPPED_LINE, "")


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    child = (
        "from rlhf.launch.signals import PARENT, die_with; import os, time; "
        "die_with(int(os.environ[PARENT])); print(flush=True); time.sleep(60)"
    )
    parent = (
        "import sys; from rlhf.launch.local import Ranks; "
        f"started = Ranks([sys.executable, '-c', {child!r}], 2, 10.0); "
        "print(*[process.pid for process in started.processes], flush=True); started.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    pids = [int(word) for line in lines for word in line.split()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ranks_know_their_place(tmp_path: Path) -> None:
    code = (
        "import os, sys; e = os.environ; open(sys.argv[1] + e['RANK'], 'w').write("
        f"' '.join([e['LOCAL_RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'], e['{PARENT}']]))"
    )
    assert ranks(code, str(tmp_path / "rank")).wait() == 0
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == f"{rank} 2 127.0.0.1 {os.getpid()}"


def test_a_port_is_kept_for_the_ranks() -> None:
    code = (
        "import os, socket, sys; port = int(os.environ['MASTER_PORT']); other = socket.socket()\n"
        "try: other.bind(('127.0.0.1', port))\n"
        "except OSError: socket.create_server(('', port)).close()\n"
        "else: sys.exit('taken')"
    )
    assert Ranks([sys.executable, "-c", code], 1, 10.0).wait() == 0


SIGNALS = """
import ctypes, os, signal, sys, time
from rlhf.launch import signals
signals.PATIENCE = 0.3
def send(name="USR1"):
    os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
"""
"""Names for the processes below."""
NOTHING_TRAINED = (
    "stopped before the first step: nothing was trained; continue with --resume, or start again if "
    "there is no run folder\n"
)


def process_of(code: str, *, rank: str = "0") -> tuple[int, str]:
    """Return the exit code and the output of a process that runs this code."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS + code],
        env={**os.environ, "RANK": rank}, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_signal_that_comes_before_the_configuration_is_read_is_obeyed_afterwards() -> None:
    code = """
signals.hold_back()
send()
print("read", flush=True)
with signals.ending_at_once({names}):
    time.sleep(50)
"""
    assert process_of(code.format(names=["TERM", "USR1"])) == (143, f"read\n{NOTHING_TRAINED}")
    assert process_of(code.format(names=["TERM", "USR1"]), rank="1") == (143, "read\n")
    # It is no signal that stops this run.
    assert process_of(code.format(names=["TERM"])) == (-signal.SIGUSR1, "read\n")


def test_another_signal_does_not_interrupt_the_end() -> None:
    code = """
with signals.ending_at_once(["TERM"]):
    try:
        send("TERM")
    finally:
        send("TERM")
        print("cleaned up", flush=True)
"""
    assert process_of(code) == (143, f"{NOTHING_TRAINED}cleaned up\n")


@pytest.mark.parametrize(("name", "code"), [("USR1", 143), ("INT", 130)])
def test_a_signal_ends_a_process_that_waits_in_a_library(name: str, code: int) -> None:
    waits = f"""
signals.end_late()
if (child := os.fork()) == 0:
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIG{name})
    os._exit(0)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with signals.ending_at_once(["USR1"]):
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""
    assert process_of(waits) == (code, NOTHING_TRAINED if code == 143 else "")


def test_a_library_that_catches_everything_does_not_lose_a_signal() -> None:
    code = """
signals.end_late()
with signals.ending_at_once(["TERM"]):
    try:
        send("TERM")
    except:
        pass
    time.sleep(50)
"""
    assert process_of(code) == (143, NOTHING_TRAINED)


def test_a_signal_to_a_process_that_a_rank_has_forked_does_not_end_the_rank() -> None:
    code = """
signals.end_late()
with signals.ending_at_once(["TERM"]):
    if (child := os.fork()) == 0:
        time.sleep(50)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    time.sleep(0.6)
"""
    assert process_of(code) == (0, f"{-signal.SIGTERM}\n")


def test_a_signal_after_the_run_keeps_its_exit_code() -> None:
    code = """
import atexit
import rlhf.__main__ as script

def main():
    atexit.register(print, "not reached")
    atexit.register(send)
    return 3

script.main = main
sys.argv = ["rlhf", "run"]
script.run_process()
"""
    assert process_of(code) == (3, "")


def test_slurm_without_scontrol_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "MASTER_ADDR", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    values = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_NODELIST": "node[1-2]"}
    for name, value in {**values, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RLHFError) as error:
        join_slurm()
    assert str(error.value) == (
        "cannot find the first host of 'node[1-2]' with scontrol; set MASTER_ADDR"
    )


def test_slurm_tasks_become_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    join_slurm()
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    assert found == ["5", "8", "1", "20123"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        os.environ.pop(name)  # Not monkeypatch, whose undo would bring it back for other tests.


def test_a_batch_script_of_slurm_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    join_slurm()
    assert "RANK" not in os.environ
