"""How runs end early: stopped, killed in a save, poisoned, locked out; through the real command, in
a process of its own where the process ends."""

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import rlhf.train.rank as rank_run
import sft_runs
from rlhf.api import start as start_rank
from rlhf.commands.main import main
from rlhf.folder.run_folder import read_json
from rlhf.request.reader import read_config
from rlhf_devkit import Ranks, column
from rlhf_devkit.forked import Forked
from rlhf_devkit.ranks import RankFailure
from sft_runs import Inputs

EXTENSION = '''
import os, signal, time
from pathlib import Path
import attrs, pluggy
from rlhf.plugin import ExtensionPlugin

hookimpl = pluggy.HookimplMarker("rlhf")


class Extension:
    """Edits the plan; kills the process when the engine's state has been read that often: at the
    start, after the first step, then in every save."""

    saves = 0

    @hookimpl(wrapper=True)
    def save_checkpoint(self, engine):
        result = yield
        self.saves += 1
        if self.saves == int(os.environ.get("KILL_IN_SAVE", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    @hookimpl(wrapper=True)
    def configure_zero(self, config, mesh, model_shape):
        plan = yield
        settings = {**plan.settings, "gradient_clipping": 0.125}
        return attrs.evolve(plan, settings=settings, summary=plan.summary + ", clipped by probe")


plugin = ExtensionPlugin(hooks="probe_module:Extension")
'''
OBSERVER = '''
import json, os, time
import pluggy
from rlhf.plugin import ObserverPlugin
from rlhf.registry import observers as limits

hookimpl = pluggy.HookimplMarker("rlhf")


class Observer:
    """Writes down its calls; takes STEP_SECONDS for a step, and fails in the hook FAIL_IN. After a
    signal, a run waits BRIEF seconds for it."""

    def _tell(self, *what):
        if what[0] == os.environ.get("FAIL_IN"):
            raise ConnectionError("webhook is down")
        with open(os.environ["EVENTS"], "a") as file:
            file.write(json.dumps(what) + "\\n")

    @hookimpl
    def on_start(self, run):
        limits.BRIEF = float(os.environ.get("BRIEF", limits.BRIEF))
        self._tell("start", run.name, run.steps)

    @hookimpl
    def on_step(self, run, step, metrics):
        self._tell("step", step)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))

    @hookimpl
    def on_eval(self, run, step, metrics):
        self._tell("eval", step)

    @hookimpl
    def on_checkpoint(self, run, step, directory):
        self._tell("checkpoint", step, directory.name)

    @hookimpl
    def on_finish(self, run, error):
        self._tell("finish", None if error is None else type(error).__name__)


plugin = ObserverPlugin(hooks="witness_module:Observer")
'''


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an extension and an observer as installed distributions."""
    folder = tmp_path_factory.mktemp("site")
    for kind, name, source in (
        ("extensions", "probe", EXTENSION),
        ("observers", "witness", OBSERVER),
    ):
        (folder / f"{name}_module.py").write_text(source)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rlhf.{kind}]\n{name} = {name}_module:plugin\n")
    return folder


@pytest.fixture
def start(inputs: Inputs, plugins: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Start `rlhf run sft` on the tiny inputs; the process, with its output in a pipe."""

    def started(*more: str, **variables: str) -> Forked:
        path = os.pathsep.join([str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "EVENTS": str(tmp_path / "events")} | variables
        env |= {"RLHF_CACHE": str(inputs.cache), "OMP_NUM_THREADS": "1"}
        words = sft_runs.words(inputs, tmp_path / "run", *more)
        return Forked("-m", "rlhf", "run", "sft", *words, environment=env)

    return started


Finished = Callable[..., tuple[int, str, str]]


@pytest.fixture
def finished(inputs: Inputs, plugins: Path, one: Ranks, tmp_path: Path) -> Finished:
    """Carry out `rlhf run sft` on the tiny inputs with one process, which is there already; exit
    code, output and errors."""

    def carried_out(*more: str, **variables: str) -> tuple[int, str, str]:
        words = sft_runs.words(inputs, tmp_path / "run", *more, "--nproc", "1")
        variables |= {"RLHF_CACHE": str(inputs.cache), "EVENTS": str(tmp_path / "events")}
        (result,) = one.run(in_rank, words, str(plugins), variables)
        return result

    return carried_out


def in_rank(words: list[str], site: str, variables: dict[str, str]) -> tuple[int, str, str]:
    """`rlhf run sft` in a rank of the pool, without its place in the pool."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.syspath_prepend(site)
        patch.delenv("RANK")
        for name, value in variables.items():
            patch.setenv(name, value)
        code = main(["run", "sft", *words])
    return code, output.getvalue(), errors.getvalue()


def finish(process: Forked) -> tuple[int | None, str, str]:
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def test_extensions_and_observers_take_part(finished: Finished, tmp_path: Path) -> None:
    code, output, errors = finished(
        *("--train.steps", "4", "--checkpoint.every", "2"),
        *("--extensions", "[probe]", "--observers", "[witness, tensorboard]"),
    )
    assert code == 0, errors
    assert "clipped by probe" in output
    assert '"gradient_clipping": 0.125' in (tmp_path / "run" / "plan.json").read_text()
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "events").read_text().splitlines() == [
        '["start", "sft", 4]', '["step", 1]', '["step", 2]', '["checkpoint", 2, "step-000002"]',
        '["step", 3]', '["step", 4]', '["checkpoint", 4, "step-000004"]', '["eval", 4]',
        '["finish", null]',
    ]  # fmt: skip


def test_an_observer_that_raises_ends_neither_the_run_nor_its_checkpoints(
    finished: Finished, tmp_path: Path
) -> None:
    words = ("--train.steps", "4", "--checkpoint.every", "2", "--train.eval_at_start", "true")
    code, _, errors = finished(*words, "--observers", "[witness]", FAIL_IN="checkpoint")
    assert code == 0, errors
    file = tmp_path / "run" / "errors" / "observer-witness.txt"
    assert errors.count("warning: observer") == 1
    assert (
        "warning: observer 'witness' failed in on_checkpoint and is not called again: "
        f"ConnectionError: webhook is down; see {file}" in errors
    )
    assert "ConnectionError: webhook is down" in file.read_text()
    assert (tmp_path / "events").read_text().splitlines() == [
        '["start", "sft", 4]',
        '["eval", 0]',
        '["step", 1]',
        '["step", 2]',
    ]
    assert (tmp_path / "run" / "checkpoints" / "step-000004" / "manifest.json").exists()
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_kill_9_during_a_save_leaves_the_older_checkpoint_usable(
    finished: Finished, tmp_path: Path
) -> None:
    words = ("--train.steps", "6", "--checkpoint.every", "2", "--extensions", "[probe]")
    words += ("--checkpoint.keep", "1")
    with pytest.raises(RankFailure, match=r"the process died with exit code -9$"):
        finished(*words, KILL_IN_SAVE="4")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        ".step-000004.part",
        "step-000002",
    ]
    code, output, errors = finished(*words, "--resume")
    assert code == 0, errors
    assert "resumed    step-000002, 4 steps to go" in output
    assert column(sft_runs.read_metrics(tmp_path / "run"), "step") == [1, 2, 3, 4, 5, 6]


def test_sigterm_saves_and_exits_143_and_the_run_resumes(  # type: ignore[no-untyped-def]
    start, finished: Finished, tmp_path: Path
) -> None:
    words = ("--train.epochs", "3", "--observers", "[witness]", "--checkpoint.async", "true")
    process = start(*words, "--nproc", "2", STEP_SECONDS="0.3")
    sft_runs.wait_for(tmp_path / "events", '["step", 2]', process)
    process.send_signal(signal.SIGTERM)
    code, output, errors = finish(process)
    assert code == 143, errors
    assert "stopped by a signal after saving; continue with --resume" in output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name < "step-000018"
    code, output, errors = finished(*words, "--resume")
    assert code == 0, errors
    assert "steps to go; saved by 2 ranks, so random numbers differ\n" in output
    assert column(sft_runs.read_metrics(tmp_path / "run"), "step") == list(range(1, 19))


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.matrix)])
def test_the_first_ctrl_c_saves_and_the_run_resumes(start, tmp_path: Path, ranks: str) -> None:  # type: ignore[no-untyped-def]
    words = ("--train.steps", "9", "--observers", "[witness]", "--nproc", ranks)
    process = start(*words, "--data.workers", "1", STEP_SECONDS="0.3")
    sft_runs.wait_for(tmp_path / "events", '["step", 2]', process)
    os.killpg(process.pid, signal.SIGINT)
    code, output, errors = finish(process)
    assert code == 143, errors
    assert "stopped by a signal after saving; continue with --resume" in output
    assert "finished and saved; press Ctrl-C again to quit immediately" in errors
    assert "Traceback" not in errors
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name < "step-000009"


def test_a_stop_signal_to_all_processes_saves(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("--train.steps", "9", "--observers", "[witness]", "--data.workers", "1")
    signals = ("--checkpoint.stop_signals", "[USR1, TERM]")
    process = start(*words, *signals, "--nproc", "1", STEP_SECONDS="0.3")
    sft_runs.wait_for(tmp_path / "events", '["step", 2]', process)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.killpg(process.pid, number)
    code, output, errors = finish(process)
    assert code == 143, errors
    assert "stopped by a signal after saving; continue with --resume" in output
    # A worker that ends is an error wherever its run is, such as in an observer.
    assert errors == ""


def stopped_in(place: str, words: list[str], cache: str) -> tuple[object, str]:
    """Start a run on this rank that gets USR1 when it calls a function of rlhf.train.rank. Returns
    how the process would end, and what it prints last."""
    own = getattr(rank_run, place)

    def signalled(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return own(*arguments, **options)

    os.environ["RLHF_CACHE"] = cache
    setattr(rank_run, place, signalled)
    before = os.dup(1)
    try:
        with tempfile.TemporaryFile("w+") as output:
            os.dup2(output.fileno(), 1)
            with pytest.raises(SystemExit) as ended:
                start_rank(read_config("sft", overrides=words))
            output.seek(0)
            return ended.value.code, output.read()
    finally:
        os.dup2(before, 1)
        os.close(before)
        setattr(rank_run, place, own)


BEFORE = (
    "stopped before the first step: nothing was trained; continue with --resume, or start again if "
    "there is no run folder\n"
)
AFTER = "stopped after the last step; --resume writes what is missing\n"


@pytest.mark.parametrize(
    ("place", "line"), [("prepare_data", BEFORE), ("set_up", BEFORE), ("export_at_end", AFTER)]
)
def test_a_signal_outside_of_the_steps_ends_the_run_with_143(
    place: str, line: str, one: Ranks, inputs: Inputs, tmp_path: Path
) -> None:
    more = ("--train.steps", "1", "--checkpoint.stop_signals", "[USR1]")
    words = sft_runs.words(inputs, tmp_path / "run", *more)
    assert one.run(stopped_in, place, words, str(inputs.cache)) == [(143, line)]
    if place == "set_up":
        assert read_json(tmp_path / "run" / "summary.json")["ended"] == "signal"
    if place == "export_at_end":
        one.run(sft_runs.run, [*words, "--resume"], str(inputs.cache))
        assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=pytest.mark.matrix), "2"])
def test_the_second_ctrl_c_ends_at_once(start, tmp_path: Path, ranks: str) -> None:  # type: ignore[no-untyped-def]
    words = ("--train.steps", "9", "--observers", "[witness]", "--nproc", ranks)
    process = start(*words, STEP_SECONDS="60", BRIEF="2")
    sft_runs.wait_for(tmp_path / "events", '["step", 1]', process)
    os.killpg(process.pid, signal.SIGINT)
    while "press Ctrl-C again to quit immediately" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 130
    assert errors.splitlines()[-1].startswith("error: interrupted; --resume continues from")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_in_use_is_refused_in_one_line(  # type: ignore[no-untyped-def]
    start, inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    first = start("--observers", "[witness]", "--train.steps", "1000", STEP_SECONDS="0.2")
    sft_runs.wait_for(tmp_path / "events", '["start"', first)
    words = sft_runs.words(inputs, tmp_path / "run", "--overwrite")
    (message,) = one.errors(sft_runs.run, words, str(inputs.cache))
    first.send_signal(signal.SIGTERM)
    assert message == (
        f"another run is writing to {tmp_path / 'run'}; wait for it or choose another --output"
    )
    assert finish(first)[0] == 143


def test_a_gradient_that_is_not_finite_ends_the_run_with_step_and_rows(
    finished: Finished, inputs: Inputs
) -> None:
    code, _, errors = finished("--optim.lr", "1e30", "--optim.warmup", "0", "--train.steps", "4")
    assert code == 2
    message = errors.splitlines()[-1]
    assert message.startswith(
        "error: step 2: the loss is finite but the norm of its gradient is nan, in "
    )
    assert f"{inputs.train} line " in message
    assert message.endswith(": no weight was changed; look at these rows, or lower optim.lr")


def test_a_value_read_a_step_later_names_its_step_and_changes_no_weight(
    inputs: Inputs, one: Ranks, tmp_path: Path
) -> None:
    rounded = ("--model.dtype", "bf16", "--optim.states", "bf16", "--deepspeed.stage", "0")
    for steps in ("2", "4"):
        more = ("--optim.lr", "1e30", "--optim.warmup", "0", "--train.steps", steps, "--overwrite")
        words = sft_runs.words(inputs, tmp_path / "run", *rounded, *more)
        (message,) = one.errors(sft_runs.run, words, str(inputs.cache))
        assert message.startswith("step 2: the loss is"), message
        assert f"{inputs.train} line " in message
        assert column(sft_runs.read_metrics(tmp_path / "run"), "step") == [1]
        assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.matrix
def test_random_numbers_are_drawn_anew_if_as_many_ranks_are_divided_in_another_way(
    inputs: Inputs, two: Ranks, tmp_path: Path
) -> None:
    words = sft_runs.words(inputs, tmp_path / "run", "--train.stop_at")
    two.run(sft_runs.run, [*words, "2"], str(inputs.cache))
    sequence = ("--deepspeed.sequence_parallel", "2", "--resume")
    (output, _), _ = two.run(sft_runs.printed, [*words, "4", *sequence], str(inputs.cache))
    assert "the 2 ranks were divided in another way, so random numbers differ\n" in output


WAITING = """
import sys, time
import torch
from torch import distributed
import rlhf.__main__ as script

rank, code, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def main():
    store_of_ranks = distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", store=store_of_ranks, rank=rank, world_size=2)
    values = torch.ones(10)
    values.attribute = 1
    if rank == 1:
        time.sleep(0.3)
        distributed.all_reduce(values)
        time.sleep(0.7)
        return 0
    main.group = distributed.group.WORLD
    sys.setswitchinterval(1000)
    distributed.all_reduce(values, async_op=True)
    del values
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        pass
    return code

script.main = main
script.run_process()
"""


@pytest.mark.parametrize("code", [0, pytest.param(143, marks=pytest.mark.matrix)])
def test_a_thread_that_waits_for_the_interpreters_lock_does_not_abort_a_finished_process(
    code: int, tmp_path: Path
) -> None:
    """It has received the other rank's values, and frees a tensor that Python knows."""
    command = [sys.executable, "-c", WAITING]
    words = [str(code), str(tmp_path / "store")]
    with subprocess.Popen([*command, "1", *words]) as other:
        ended = subprocess.run([*command, "0", *words], capture_output=True, text=True, timeout=300)
        assert (ended.returncode, ended.stderr) == (code, "")
        assert other.wait() == 0
