"""The observer with the real library in its offline mode, whose file is read back."""

import json
import os
import struct
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import wandb
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record

from rlhf_devkit import ObserverConformance, call_hooks
from rlhf_devkit.observed import PICTURED
from rlhf_observer_wandb import WandbConfig
from rlhf_observer_wandb.observer import Wandb

OFFLINE = WandbConfig(project="mine", tags=("small",), mode="offline")
KEY = "f" * 40
BLOCK, HEADER = 32768, struct.Struct("<IHB")


@pytest.fixture(autouse=True)
def _wandb(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A key that must not be written anywhere. Tables keep temporary folders until the process
    ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tables")))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    os.environ.pop("WANDB_SERVICE", None)


def records(folder: Path) -> Iterator[Record]:
    """The records of the offline runs in a run folder: LevelDB's log format after 7 bytes."""
    wandb.teardown()  # Its service writes the file.
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, place, record = file.read_bytes(), HEADER.size, b""
        while place < len(content):
            if BLOCK - place % BLOCK < HEADER.size:
                place += BLOCK - place % BLOCK
            _, size, kind = HEADER.unpack_from(content, place)
            record += content[place + HEADER.size : place + HEADER.size + size]
            place += HEADER.size + size
            if kind in (1, 4):  # A whole record, or the last part of one.
                yield Record.FromString(record)
                record = b""


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a curve."""
    rows = [record.history.item for record in records(folder) if record.HasField("history")]
    values = [
        {(it.key or it.nested_key[0]): json.loads(it.value_json) for it in row} for row in rows
    ]
    return [(row["step"], row[name]) for row in values if name in row]


def test_configuration_curves_and_the_checkpoint_are_in_the_run(tmp_path: Path) -> None:
    call_hooks(Wandb(OFFLINE), tmp_path, range(1, 4))
    run = next(record.run for record in records(tmp_path) if record.HasField("run"))
    assert (run.project, run.run_id, list(run.tags)) == (
        "mine",
        f"id-of-{tmp_path.name}",
        ["small"],
    )
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["optim.lr"] == 1e-5
    assert config["plan"]["policy"]["stage"] == 2
    assert logged(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert logged(tmp_path, "eval/loss") == [(3, 0.5)]
    summaries = [record.summary.update for record in records(tmp_path)]
    written = {item.key: item.value_json for update in summaries for item in update}
    assert written["checkpoint"].endswith('step-000003"')
    assert [it.exit.exit_code for it in records(tmp_path) if it.HasField("exit")] == [0]


def test_the_samples_of_an_evaluation_are_a_table(tmp_path: Path) -> None:
    call_hooks(Wandb(OFFLINE), tmp_path, [1])
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/samples_*.table.json")
    assert json.loads(file.read_text())["data"] == [
        [1, "rows.jsonl:1", "1 + 1 =", "2", 0.5],
        [1, "rows.jsonl:1", "1 + 1 =", "3\n|", -1.0],
    ]


def test_images_of_samples_are_logged_with_their_rows(tmp_path: Path) -> None:
    file = BytesIO()
    Image.new("RGB", (2, 6), "blue").save(file, "JPEG")
    other = f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
    samples = [*PICTURED, {**PICTURED[1], "row": "rows.jsonl:3", "images": [other]}]
    call_hooks(Wandb(OFFLINE), tmp_path, [1], samples=samples)
    items = [it for each in records(tmp_path) for it in each.history.item]
    shown = {it.nested_key[1]: it.value_json for it in items if "eval/images" in it.nested_key}
    assert json.loads(shown["captions"]) == [
        "rows.jsonl:1: image 1", "rows.jsonl:1: image 2", "rows.jsonl:3: image 1"
    ]  # fmt: skip
    assert (shown["width"], shown["height"]) == ("4", "6")
    (folder,) = tmp_path.glob("wandb/offline-run-*/files")
    drawn = [np.asarray(Image.open(folder / name)) for name in json.loads(shown["filenames"])]
    assert [picture[1, 1].argmax() for picture in drawn] == [0, 0, 2]
    assert [picture[5, 3].min() for picture in drawn] == [255, 255, 255]


class TestWandb(ObserverConformance):
    observer = "wandb"
    words = ("--observers.wandb.mode", "offline")


def test_a_resumed_run_has_the_same_id_and_a_failed_one_another_exit_code(tmp_path: Path) -> None:
    call_hooks(Wandb(OFFLINE), tmp_path, range(1, 5))
    call_hooks(Wandb(OFFLINE), tmp_path, range(3, 5), error=RuntimeError("a device was lost"))
    ids = {record.run.run_id for record in records(tmp_path) if record.HasField("run")}
    assert ids == {f"id-of-{tmp_path.name}"}
    assert [step for step, _ in logged(tmp_path, "train/loss")] == [1, 2, 3, 4, 3, 4]
    assert [it.exit.exit_code for it in records(tmp_path) if it.HasField("exit")] == [0, 1]


def test_no_file_has_the_key(tmp_path: Path) -> None:
    call_hooks(Wandb(OFFLINE), tmp_path, [1])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_the_remedy_names_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    observer = Wandb(OFFLINE)
    call_hooks(observer, tmp_path, [1])
    wandb.teardown()
    assert observer.remedy == (
        "without a connection to https://wandb.example, set observers.wandb.mode to offline"
    )
