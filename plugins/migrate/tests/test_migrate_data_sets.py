"""`rlhf migrate`: data sets of TRL, Axolotl and LLaMA-Factory as entries of `data.train`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import RLHFError
from rlhf_migrate.arguments import Arguments
from rlhf_migrate.rules import Migration
from rlhf_migrate.translate import translate

CHATS = {
    "path": "json", "data_files": ["m.jsonl", "uni.jsonl"], "type": "chat_template",
    "chat_template": "chatml", "message_field_training": "masked", "drop_system_message": True,
    "field_system": "sys", "skip": 3, "strange": 1, "ds_type": "json", "train_on_eos": "turn",
    "roles_to_train": ["assistant", "gpt"],
}  # fmt: skip


def of(project: str, folder: Path, **keys: Any) -> Migration:
    """What becomes of the keys of a project's SFT."""
    return translate(Arguments(project=project, variant="sft", keys=keys), folder=folder)


def test_texts_around_the_columns_of_axolotl_change_what_is_learned(tmp_path: Path) -> None:
    kind = {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction}"}
    rows = {"path": "a.jsonl", "type": kind, "roles_to_train": []}
    keys = {"base_model": "m", "datasets": [rows]}
    arguments = Arguments(project="axolotl", variant="sft", keys=keys)
    assert translate(arguments, folder=tmp_path).lost == {
        "datasets: roles_to_train []": "",
        "datasets: format [INST] {instruction}": (
            "prompts are used as they are; put it into the rows"
        ),
    }


def test_each_file_of_a_data_set_of_axolotl_is_an_entry_and_no_key_is_dropped(
    tmp_path: Path,
) -> None:
    migration = of("axolotl", tmp_path, datasets=[CHATS])
    columns = {"system": "sys"}
    assert migration.settings["data.train"] == [
        {"path": "m.jsonl", "columns": columns}, {"path": "uni.jsonl", "columns": columns},
    ]  # fmt: skip
    assert migration.lost == {
        "datasets: chat_template chatml": (
            "the tokenizer's own template is used here; data.chat_template replaces it by a file "
            "or chatml"
        ),
        "datasets: message_field_training masked": "rename it to train in the rows",
        "datasets: drop_system_message true": "",
        "datasets: skip 3": "",
    }
    assert migration.unknown == ["datasets: strange"]
    assert migration.unneeded == ["datasets: ds_type"]
    others = {"path": "a.jsonl", "roles_to_train": ["assistant", "user"], "train_on_eos": "all"}
    migration = of("axolotl", tmp_path, datasets=[others])
    assert list(migration.lost) == ["datasets: roles_to_train user", "datasets: train_on_eos all"]


@pytest.mark.parametrize(
    ("source", "entries"),
    [
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, ["a.jsonl", "b.jsonl"]),
        ({"path": "json", "data_files": "a.jsonl"}, ["a.jsonl"]),
        ({"path": "json", "data_files": {"train": ["a.jsonl", "b.jsonl"], "test": "c.jsonl"}},
         ["a.jsonl", "b.jsonl"]),
        ({"path": "json", "data_files": {"train": "a.jsonl", "test": "c.jsonl"}, "split": "test"},
         ["c.jsonl"]),
        ({"path": "json", "data_dir": "sub"}, ["sub"]),
        ({"path": "./rows", "data_dir": "sub", "data_files": "a.jsonl"}, ["rows/sub/a.jsonl"]),
        ({"path": "a.jsonl", "split": "train[:100]"}, [{"path": "a.jsonl", "limit": 100}]),
        ({"path": "org/a", "split": "train[:10%]"}, [{"path": "org/a", "split": "train[:10%]"}]),
    ],
)  # fmt: skip
def test_the_files_of_a_data_set_are_those_that_datasets_reads(
    source: dict[str, Any], entries: list[Any], tmp_path: Path
) -> None:
    for project in ("trl", "axolotl"):
        migration = of(project, tmp_path, datasets=[source])
        assert migration.settings["data.train"] == entries
        assert not migration.lost


def test_parts_of_a_data_set_that_cannot_be_chosen_are_reported(tmp_path: Path) -> None:
    rows = [
        {"path": "org/a", "data_files": "a.jsonl", "data_dir": "sub"},
        {"path": "b.jsonl", "split": "train[:10%]"},
        {"path": "c.jsonl", "split": "test"},
    ]
    migration = of("trl", tmp_path, datasets=rows)
    assert migration.settings["data.train"] == ["org/a", "b.jsonl", "c.jsonl"]
    hub = "parts of a data set on the hub cannot be chosen; name downloaded files"
    file = "a file has no splits; `limit` of its entry chooses its first rows"
    assert migration.lost == {
        "datasets: data_dir sub": hub,
        "datasets: data_files a.jsonl": hub,
        "datasets: split train[:10%]": file,
        "datasets: split test": file,
    }
    other = {"path": "json", "data_files": {"test": "a.jsonl"}}
    with pytest.raises(RLHFError) as error:
        of("trl", tmp_path, datasets=[other])
    assert str(error.value) == "datasets: data_files has no split train; it has test"


def test_names_of_the_parts_of_messages_are_reported(tmp_path: Path) -> None:
    note = "messages have role and content here, or from and value; rename them in the rows"
    names = {"message_field_role": "speaker", "message_field_content": "text"}
    migration = of("axolotl", tmp_path, datasets=[{"path": "a.jsonl", **names}])
    assert migration.notes['datasets: {"role": "speaker", "content": "text"}'] == note
    theirs = {"message_field_role": "from", "message_field_content": "value"}
    assert note not in of("axolotl", tmp_path, datasets=[{"path": "a", **theirs}]).notes.values()
    tags = {"role_tag": "speaker", "content_tag": "text", "user_tag": "me", "system_tag": "system"}
    about = {
        "chats": {"file_name": "a.json", "tags": tags, "columns": {"images": "i"}, "strange": 1},
        "hub": {"hf_hub_url": "org/a", "folder": "sub", "ms_hub_url": "b/a"},
        "other": {"ms_hub_url": "b/a"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(about))
    migration = of("llamafactory", tmp_path, dataset="chats,hub,other")
    chats = {"path": str(tmp_path / "data" / "a.json"), "columns": {"images": "i"}}
    assert migration.settings["data.train"] == [chats, "org/a", "other"]
    assert migration.notes['dataset chats: {"role": "speaker", "content": "text"}'] == note
    assert migration.lost == {
        "dataset chats: user_tag me": "rename them in the rows",
        "dataset hub: data_dir sub": (
            "parts of a data set on the hub cannot be chosen; name downloaded files"
        ),
        "dataset other: ms_hub_url b/a": ("data sets are read from files and the Hugging Face Hub"),
    }
    assert migration.unknown == ["dataset chats: strange"]
