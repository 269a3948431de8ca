"""What every observer has to prove, and the file that this one writes."""

import json
from pathlib import Path

from rlhf.hookspecs import RunRecord
from rlhf.plugin import Config
from rlhf_devkit import ObserverConformance
from rlhf_observer_new_name import NewName


class TestNewName(ObserverConformance):
    observer = "new_name"


def test_the_file_has_the_newest_step_and_the_end(tmp_path: Path) -> None:
    run = RunRecord(name="sft", folder=tmp_path, config=Config(), steps=4)
    observer = NewName()
    observer.on_start(run=run)
    observer.on_step(run=run, step=3, metrics={"loss": 0.5})
    observer.on_finish(run=run, error=ValueError("no more rows"))
    assert json.loads((tmp_path / "status.json").read_text(encoding="utf-8")) == {
        "state": "failed: no more rows",
        "steps": 4,
        "step": 3,
        "loss": 0.5,
    }
