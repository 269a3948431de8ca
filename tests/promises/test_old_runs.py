"""Run folders that an earlier version wrote: their settings without effect are still read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.errors import RLHFError
from rlhf.folder.run_folder import check_resumable
from rlhf.request.reader import read_config
from rlhf.request.settings_tree import to_tree

REMOVED = {
    "sft": {
        "deepspeed": {"tensor_parallel": 1, "sequence_parallel": 1},
        "train": {"trace": None},
        "data": {"train": [{"path": "d.jsonl", "convert": None}]},
        "model": {"fp8": "reference"},
    },
    "rm": {"rm": {"loss": "log_exp"}, "deepspeed": {"tensor_parallel": 1}},
}


def recorded(name: str, folder: Path, removed: dict[str, dict[str, Any]]) -> list[str]:
    """Write config.yaml as an earlier version did; the words that give the same configuration."""
    words = ["--model", "m", "--data", "d.jsonl", "--output", str(folder)]
    tree = to_tree(read_config(name, overrides=words).config)
    for section, settings in removed.items():
        tree[section] |= settings
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return words


@pytest.mark.parametrize("name", REMOVED)
def test_an_old_run_is_read_for_export_and_for_resuming(name: str, tmp_path: Path) -> None:
    words = recorded(name, tmp_path, REMOVED[name])
    read_config(name, recorded=tmp_path / "config.yaml")
    request = read_config(name, overrides=[*words, "--resume"])
    with pytest.raises(RLHFError) as caught:
        check_resumable(request, tmp_path)
    assert "manifest" in str(caught.value)  # The configuration has passed.


def test_a_removed_setting_with_another_value_is_refused(tmp_path: Path) -> None:
    recorded("sft", tmp_path, {"train": {"trace": 2}})
    with pytest.raises(RLHFError, match=r"train\.trace: unknown setting"):
        read_config("sft", recorded=tmp_path / "config.yaml")


def test_a_removed_value_is_refused_with_what_replaces_it(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        read_config("sft", overrides=["--model.fp8", "reference"], inputs=False)
    assert str(caught.value) == (
        'model.fp8: expected one of tensorwise, rowwise, got "reference"; reference was '
        "removed, use rowwise"
    )
    recorded("sft", tmp_path, {"model": {"recompute": "offload"}})
    with pytest.raises(RLHFError) as caught:
        read_config("sft", recorded=tmp_path / "config.yaml")
    assert (
        "model.recompute: expected one of auto, none, selective, full, "
        'got "offload"; offload was removed, use full'
    ) in str(caught.value)


@pytest.mark.parametrize("setting", ["rm.loss bradley_terry", "train.trace 1"])
def test_a_removed_setting_is_refused_as_unknown(setting: str, tmp_path: Path) -> None:
    dotted, value = setting.split()
    section, name = dotted.split(".")
    file = tmp_path / "rm.yaml"
    file.write_text(f"{section}: {{{name}: {value}}}")
    for words in ([f"--{dotted}", value], [str(file)]):
        with pytest.raises(RLHFError, match=rf"{section}\.{name}: unknown setting"):
            read_config("rm", overrides=words, inputs=False)
