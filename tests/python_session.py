"""What a script does with `rlhf`, for test_python.py: each function runs in its own process."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs

from rlhf import RLHFError, RunResult, api, export, read_config, run
from rlhf.launch.local import Ranks


def traces() -> Any:
    """Return what a run must leave as it was."""
    from torch import distributed

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    children = len(multiprocessing.active_children())
    return dict(os.environ), handlers, distributed.is_initialized(), children


def told(result: RunResult) -> dict[str, Any]:
    """Return a result as plain data."""
    return attrs.asdict(result) | {"folder": str(result.folder), "model": str(result.model)}


def twice(settings: dict[str, Any], folder: str) -> Any:
    """Run, fail and run again, and export."""
    config = read_config("sft", overrides={**settings, "output": Path(folder, "first")})
    before = traces()
    first = run(config)
    assert traces() == before
    try:
        run(read_config("sft", overrides={**settings, "output": f"{folder}/bad", "optim.lr": 1e30}))
    except RLHFError as error:
        problem = str(error)
    assert traces() == before
    second = run(attrs.evolve(config, output=f"{folder}/second"))
    assert traces() == before
    checkpoint = export(second.folder, Path(folder, "exported"))
    return told(first), problem, told(second), str(checkpoint)


def interrupted(settings: dict[str, Any], folder: str, nproc: int) -> Any:
    """Stop a long run by Ctrl-C once it has logged a step, and continue it for two more."""
    settings |= {"output": f"{folder}/run", "train.steps": 5000, "checkpoint.every": None}
    config = read_config("sft", overrides=settings)
    before = traces()
    threading.Thread(target=_interrupt_after, args=(Path(folder, "run", "metrics.jsonl"),)).start()
    stopped = run(config, nproc=nproc)
    assert traces() == before
    steps = stopped.metrics[-1]["step"]
    config = attrs.evolve(config, train=attrs.evolve(config.train, stop_at=steps + 2))
    return told(stopped), told(run(config, nproc=nproc, resume=True))


def in_two_processes(settings: dict[str, Any], folder: str) -> Any:
    """Run on two ranks, before whose start another run creates its folder; then fail on them."""

    def start(*arguments: Any, **options: Any) -> Ranks:
        with suppress(FileExistsError):
            Path("runs/sft-1").mkdir(parents=True)
        return Ranks(*arguments, **options)

    with patch.object(api, "Ranks", start):
        result = run(read_config("sft", overrides=settings), nproc=2)
    assert "torch" not in sys.modules or not traces()[2]
    try:
        bad = {**settings, "output": f"{folder}/bad", "optim.lr": 1e30}
        run(read_config("sft", overrides=bad), nproc=2)
    except RLHFError as error:
        return told(result), str(error)


def _interrupt_after(file: Path) -> None:
    while not file.exists() or not file.read_text():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    name, arguments, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(globals()[name](*json.loads(arguments))))
