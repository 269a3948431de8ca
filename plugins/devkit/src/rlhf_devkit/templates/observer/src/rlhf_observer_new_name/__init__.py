"""The observer `new_name`: the state of a run in `status.json` of its folder, for a watchdog."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf.hookspecs import RunRecord, hookimpl
from rlhf.plugin import ObserverPlugin


class NewName:
    """Writes the newest step with its loss, and how the run ended."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}

    @hookimpl
    def on_start(self, run: RunRecord) -> None:
        self._write(run, state="running", steps=run.steps)

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        self._write(run, step=step, loss=metrics["loss"])

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        self._write(run, state="ended" if error is None else f"failed: {error}")

    def _write(self, run: RunRecord, **changes: Any) -> None:
        self._status |= changes
        (run.folder / "status.json").write_text(json.dumps(self._status) + "\n", encoding="utf-8")


plugin = ObserverPlugin(hooks="rlhf_observer_new_name:NewName")
