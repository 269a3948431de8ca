"""A run as its folder records it, while it runs and after its end."""

import json
from pathlib import Path

from fits import on_accelerator, small_run

from rlhf.folder.recorded import read_newest, read_run
from rlhf.folder.run_folder import RunFolder
from rlhf.request.reader import read_config
from rlhf.train.dataset import prepare_data
from rlhf.train.introduction import summary


def test_a_run_that_writes_is_running_and_fails_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"steps": 4, "ended": None}))
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 3.0}\n{"step": 7, "lo')
    run = RunFolder(folder, fresh=False)
    assert read_newest(folder).state == "running"
    assert read_run(folder).left_out == []  # Its last line may still be written.
    run.__exit__(ValueError, ValueError("row 3 is odd\nand more"), None)
    assert read_newest(folder).state == "failed"
    assert "row 3 is odd" in read_run(folder).summary["error"]
    assert read_run(folder).left_out == ["1 line of metrics.jsonl"]


def test_the_summary_of_a_run_on_an_accelerator_has_its_estimate_by_part(tmp_path: Path) -> None:
    fit = on_accelerator(small_run(tmp_path), 2**30)
    request = read_config("sft", overrides=small_run(tmp_path))
    memory = summary(fit, prepare_data(request))["memory"]
    assert memory["peak"] == fit.peak == sum(memory["parts"].values())
    assert memory["device"] == 2**30
