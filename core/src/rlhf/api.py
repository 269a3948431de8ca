"""Runs from Python: what the commands `rlhf run` and `rlhf export` call.

`from rlhf import read_config, run, export` loads neither torch nor transformers; a run does.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import frozen

from rlhf.config.field_docs import documented
from rlhf.config.sections import Config
from rlhf.errors import RanksFailed, RLHFError
from rlhf.folder import checkpoints, run_folder
from rlhf.folder.disk import check_path, new_folder
from rlhf.launch.calling_process import only_rank, same_environment
from rlhf.launch.clock import Clock
from rlhf.launch.hosts import Host, check_world, join_slurm, this_host
from rlhf.launch.importing import importing, importing_rank
from rlhf.launch.local import Ranks, num_devices, wait_at_gate
from rlhf.launch.proxies import bypass_proxies
from rlhf.launch.signals import DAY, FOLDER, PARENT, STOPPED, die_with, ending_at_once
from rlhf.request import reader
from rlhf.request.settings_tree import to_tree
from rlhf.request.words import option

__all__ = ["RLHFError", "RunResult", "export", "read_config", "run"]


@documented
@frozen(kw_only=True)
class RunResult:
    """What a run has left in its folder."""

    folder: Path
    """The run folder."""
    ended: str
    """Why the run ended: `done`, `stop_at`, `hours` or `patience`; `signal` if SIGTERM or Ctrl-C
    stopped it, so that `run(config, resume=True)` continues it."""
    model: Path | None
    """The trained model, or None if the run was stopped before it wrote one."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl, one per logged step and per evaluation, each with its `step`. The
    names of an evaluation begin with `eval/`."""


def read_config(
    trainer: str,
    *,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Return the configuration of a run of `trainer`, checked as a whole.

    `overrides` change the settings of the YAML file. Their names are dotted, or sections with
    mappings: `{"model": "Qwen/Qwen3-0.6B", "optim.lr": 1e-5, "lora": {"rank": 16}}`. Without model
    and data, the configuration is that of the trainer's demo. Raises RLHFError with all problems at
    once.
    """
    words = [option(name, value) for name, value in overrides.items()]
    return reader.read_config(trainer, overrides=[*([str(file)] if file else []), *words]).config


def run(
    config: Config,
    *,
    nproc: int | None = None,
    resume: bool | str = False,
    overwrite: bool = False,
) -> RunResult:
    """Train, as `rlhf run` does, and return what the run has left.

    A run of one process happens in this one; with more, `nproc` of them are started, by default
    one per device. `resume` continues the run in `config.output`, from its newest checkpoint or
    from the one that it names (`step-000400`); `overwrite` replaces it. Environment variables,
    signal handlers and process groups are afterwards what they were before. The first Ctrl-C saves
    and returns.

    Raises RLHFError for a mistake that the user can fix, KeyboardInterrupt for a second Ctrl-C or
    one outside of the steps, SystemExit with 143 for another signal there that stops runs, and
    RuntimeError if a process that was started has failed with a defect, whose traceback it prints.
    """
    words = [] if nproc is None else [f"--nproc={nproc}"]
    if overwrite:
        words.append("--overwrite")
    if resume is not False:
        words.append(f"--resume={resume if isinstance(resume, str) else ''}")
    request = reader.read_config(config.trainer_key, settings=to_tree(config), overrides=words)
    try:
        with same_environment():
            bypass_proxies()
            folder, ended = start(request)
    except RanksFailed as failure:
        if failure.code == 130:
            raise KeyboardInterrupt from None
        kind = RLHFError if failure.code == 2 else RuntimeError
        raise kind(str(failure)) from None
    model = folder / "model"
    return RunResult(
        folder=folder,
        ended=ended,
        model=model if model.is_dir() else None,
        metrics=run_folder.logged(folder),
    )


def export(source: str | Path, output: str | Path, *, role: str = "policy") -> Path:
    """Write a trained model to the new folder `output`, as `rlhf export` does.

    `source` is a checkpoint, or a run folder, of which the newest checkpoint is taken. Returns the
    checkpoint. `role` is the model, if the run trained several. Raises RLHFError.
    """
    from transformers.utils.logging import disable_progress_bar  # late: start-up time

    from rlhf.train.exporting import write_model

    disable_progress_bar()
    with new_folder(Path(output)) as target:
        checkpoint = _checkpoint_folder(Path(source))
        write_model(checkpoint, target, role)
    return checkpoint


def start(request: reader.Request) -> tuple[Path, str]:
    """Start the ranks of a run on this machine, or join those that a launcher has started. Returns
    the run folder and why the run ended. Raises RanksFailed with what the ranks have printed, and
    Stopped after a signal outside of the steps."""
    join_slurm()
    with ending_at_once(request.config.checkpoint.stop_signals):
        return _start(request)


def _start(request: reader.Request) -> tuple[Path, str]:
    startup = Clock("set-up")
    check_path(Path(request.config.output or "runs"))
    check_world(request.nproc)
    if "RANK" in os.environ:
        return _join(request, startup)
    host = this_host()
    if host.hosts == 1:
        with run_folder.chosen(request) as folder:
            run_folder.check_resumable(request, folder)
            return _start_here(request, host, folder, startup)
    if request.config.output is None:
        raise RLHFError("a run on several hosts needs --output, the same folder on all of them")
    return _start_here(request, host, Path(request.config.output), startup)


def _start_here(
    request: reader.Request, host: Host, folder: Path, startup: Clock
) -> tuple[Path, str]:
    """Start the ranks of this host; a single one is this process. Returns what `start` does."""
    with startup.part("imports"), importing():
        ranks = num_ranks(request, host)
    if ranks * host.hosts > 1:
        return folder, _start_ranks(request, host, ranks, folder)
    with only_rank():
        with startup.part("imports"), importing_rank():
            from rlhf.train.rank import run_rank  # late: start-up time

        return run_rank(request, chosen=folder, verified=True, startup=startup)


def _start_ranks(request: reader.Request, host: Host, ranks: int, folder: Path) -> str:
    """Start the ranks of this host and wait for their end. Returns why the run ended."""
    day = run_folder.day_of(request)

    def prepare() -> None:
        with importing():
            from rlhf.train.dataset import prepare_data  # late: start-up time

        prepare_data(request, day)

    command = [sys.executable, "-m", "rlhf", "run", request.name]
    checkpoint = request.config.checkpoint
    variables = {DAY: day.isoformat()} | ({FOLDER: str(folder)} if host.hosts == 1 else {})
    started = Ranks(
        command, ranks, checkpoint.stop_timeout,
        host=host, signals=checkpoint.stop_signals, places_in=folder / run_folder.RANKS,
        prepare=prepare, variables=variables, request=reader.handed_over(request),
    )  # fmt: skip
    code = started.wait()
    if code not in (0, STOPPED):
        raise RanksFailed(code, started.problem())
    summary = run_folder.read_json(folder / "summary.json")
    return "signal" if code == STOPPED else str(summary.get("ended"))


def _join(request: reader.Request, startup: Clock) -> tuple[Path, str]:
    """Be a rank that a launcher has started: ours or another."""
    ours = PARENT in os.environ
    if request.nproc is not None and not ours:
        raise RLHFError(
            f"--nproc {request.nproc} has no effect under a launcher, which starts the ranks; "
            "remove it"
        )
    if ours:
        die_with(int(os.environ[PARENT]))
    with startup.part("imports"), importing_rank():
        from rlhf.train.rank import run_rank  # late: start-up time

    with startup.part("tokenising"):
        wait_at_gate()
    # Else rank 0 verifies where it can tell the ranks of all launchers.
    one_launcher = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    chosen = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    return run_rank(request, chosen=chosen, verified=ours and one_launcher, startup=startup)


def num_ranks(request: reader.Request, host: Host) -> int:
    """Return the number of ranks that are started on this host."""
    return request.nproc or host.nproc or (1 if request.demo else num_devices())


def _checkpoint_folder(source: Path) -> Path:
    """Return the checkpoint that `source` names. Raises RLHFError if it is damaged."""
    inside, outside = source / "checkpoints", source.absolute().parent
    folder = inside if inside.is_dir() else outside
    if folder != inside and not (outside.parent / "config.yaml").is_file():
        raise RLHFError(
            f"{source} is not a checkpoint of a run; pass RUN/checkpoints/step-NNNNNN or RUN"
        )
    remedy = f"export the previous one with rlhf export {folder}/{{}} OUT"
    name = "" if folder == inside else source.name
    checkpoint = checkpoints.find(folder, name, remedy=remedy)
    if checkpoint is None:
        raise RLHFError(f"{source} has no checkpoint yet; choose another run folder")
    return checkpoint
