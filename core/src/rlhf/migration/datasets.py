"""The data sets of another project become entries of `data.train` and `data.eval`."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import RLHFError
from rlhf.migration.arguments import located

Keys = Mapping[str, Any]
Entries = list[Any]
Notes = dict[str, str]

LLAMA_FACTORY_COLUMNS = {
    "instruction": "prompt", "input": "query", "output": "response", "conversations": "messages",
    **{each: each for each in ("history", "system", "tools", "chosen", "rejected", "kto_tag")},
}  # fmt: skip
"""Keys of `columns` in LLaMA-Factory's dataset_info.json, by the names of our columns."""

AXOLOTL_LOST = (
    "roles_to_train", "train_on_eos", "shards", "split_thinking", "roles", "system_prompt",
)  # fmt: skip
"""Keys of a data set in Axolotl that change what is learned and have no counterpart."""
AXOLOTL_FORMATS = ("format", "no_input_format", "system_format")
"""Texts around the columns of a row, in a `type` of Axolotl that is a mapping."""


def _entry(path: Any, **options: Any) -> Any:
    """Return an entry, or only its path if it has no other key."""
    if options.get("split") == "train":
        del options["split"]
    kept = {name: value for name, value in options.items() if value}
    return {"path": str(path), **kept} if kept else str(path)


def _renamed(columns: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in columns if theirs and ours != theirs}


def listed(value: Any) -> list[Any]:
    """Return a list, also of a text with commas or of a single value."""
    if isinstance(value, str):
        return [each.strip() for each in value.split(",")]
    return value if isinstance(value, list) else [] if value is None else [value]


def names_in(value: Any) -> list[str]:
    """Return the names in a list, a text with commas or a single value."""
    return [str(each) for each in listed(value)]


def _data_sets(keys: Keys, key: str) -> list[Keys]:
    """Return the data sets in a list of mappings. Raises RLHFError for anything else."""
    value = keys.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise RLHFError(f"{key} is {value!r}; write a list of mappings such as `- path: NAME`")
    return value


def _trl(
    variant: str, keys: Keys, folder: Path, notes: Notes, lost: Notes
) -> tuple[Entries, Entries]:
    train = [
        _entry(
            (listed(each.get("data_files")) or [each.get("path")])[0],
            subset=each.get("name"),
            split=each.get("split"),
        )
        for each in _data_sets(keys, "datasets")
    ]
    name, subset = keys.get("dataset_name"), keys.get("dataset_config")
    if not name:
        return train, []
    train = [_entry(name, subset=subset, split=keys.get("dataset_train_split"))]
    if keys.get("eval_strategy", keys.get("evaluation_strategy", "no")) in ("no", False):
        return train, []
    return train, [_entry(name, subset=subset, split=keys.get("dataset_test_split", "test"))]


def _lost_of_axolotl(fields: Keys) -> Notes:
    """Return the keys of a data set that change what is learned and have no counterpart."""
    lost = {name: "" for name in AXOLOTL_LOST if fields.get(name) not in (None, False)}
    for name in AXOLOTL_FORMATS:
        if fields.get(name) is not None:
            lost[name] = "prompts are used as they are; put it into the rows"
    return {f"datasets: {name} {fields[name]!r}": note for name, note in lost.items()}


def _axolotl(
    variant: str, keys: Keys, folder: Path, notes: Notes, lost: Notes
) -> tuple[Entries, Entries]:
    def read(each: Mapping[str, Any]) -> Any:
        kind = each.get("type")
        fields = each if not isinstance(kind, Mapping) else {**each, **kind}
        names = "messages tools instruction input output prompt completion chosen rejected label"
        columns = _renamed((name, fields.get(f"field_{name}")) for name in names.split())
        columns |= _renamed([("text", fields.get("field"))])
        if columns.get("messages") == "conversations":
            del columns["messages"]  # It is read under this name too.
        lost.update(_lost_of_axolotl(fields))
        mapping = each.get("message_property_mappings")
        mapping = mapping if isinstance(mapping, Mapping) else {}
        theirs = (mapping.get("role", "role"), mapping.get("content", "content"))
        if theirs not in (("role", "content"), ("from", "value")):
            notes["datasets: message_property_mappings"] = (
                "messages have role and content here, or from and value; rename them in the rows"
            )
        files = listed(each.get("data_files"))
        return _entry(
            files[0] if files else each.get("path"),
            subset=each.get("name"),
            split=None if files else each.get("split"),
            columns=columns,
        )

    if (template := keys.get("chat_template")) not in (None, "tokenizer_default", "jinja"):
        notes[f"chat_template {template}"] = (
            "the tokenizer's own template is used here; data.chat_template replaces it by a file "
            "or chatml"
        )
    train = [read(each) for each in _data_sets(keys, "datasets")]
    return train, [read(each) for each in _data_sets(keys, "test_datasets")]


def _llama_factory(
    variant: str, keys: Keys, folder: Path, notes: Notes, lost: Notes
) -> tuple[Entries, Entries]:
    place = located(str(keys.get("dataset_dir", "data")), folder)
    try:
        text = (place / "dataset_info.json").read_text() if place.is_dir() else "{}"
        known = json.loads(text)
    except (OSError, ValueError) as error:
        raise RLHFError(f"cannot read {place}/dataset_info.json: {error}") from error

    def read(name: str) -> Any:
        about = known.get(name)
        if about is None:
            notes[f"dataset {name}"] = (
                "is not in a dataset_info.json that was found; replace it by its file"
            )
            return _entry(name, limit=keys.get("max_samples"))
        theirs = about.get("columns", {})
        columns = _renamed((ours, theirs.get(key)) for ours, key in LLAMA_FACTORY_COLUMNS.items())
        if columns.get("conversations") == "messages":
            del columns["conversations"]
        file = about.get("file_name")
        return _entry(
            place / file if file else about.get("hf_hub_url", name),
            subset=about.get("subset"),
            split=about.get("split"),
            limit=keys.get("max_samples", about.get("num_samples")),
            columns=columns,
        )

    if "enable_thinking" in keys:
        notes["enable_thinking"] = "set it in data.chat_template_kwargs if the template reads it"
    train = [read(name) for name in names_in(keys.get("dataset"))]
    return train, [read(name) for name in names_in(keys.get("eval_dataset"))]


def _openrlhf(
    variant: str, keys: Keys, folder: Path, notes: Notes, lost: Notes
) -> tuple[Entries, Entries]:
    first, second = keys.get("input_key", "input"), keys.get("output_key")
    templated = keys.get("apply_chat_template")
    if variant == "kd":
        second = second or "output"
    pair = (("prompt", first), ("completion", second))
    columns = {
        "sft": _renamed(pair if second else [("messages" if templated else "text", first)]),
        "kd": _renamed(pair),
        "kto": _renamed(
            [*(pair if second else [("messages", first)]), ("label", keys.get("label_key"))]
        ),
        "prm": _renamed([("text", first), ("labels", keys.get("label_key", "label"))]),
    }.get(
        variant,
        _renamed((name, keys.get(f"{name}_key")) for name in ("prompt", "chosen", "rejected")),
    )
    if templated and second:
        notes["apply_chat_template"] = (
            "the template is used for lists of messages; rows of plain text are used as they are"
        )
    text = keys.get("input_template", None if variant in ("dpo", "rm") else "User: {}\nAssistant: ")
    if text and not templated and variant != "prm":
        notes[f"input_template {text!r}"] = "prompts are used as they are; put it into the rows"
    if keys.get("dataset_probs"):
        notes["dataset_probs"] = (
            "there the share of the steps, here `weight` says how often rows are used per epoch"
        )

    def read(name: str, split: Any) -> Any:
        return _entry(
            name.partition("@")[0],
            split=split if not Path(name).suffix else None,
            limit=keys.get("max_samples"),
            columns=columns,
        )

    train_split = keys.get("dataset_split", keys.get("train_split"))
    train = [read(name, train_split) for name in names_in(keys.get("dataset"))]
    held_out = names_in(keys.get("eval_dataset"))
    return train, [read(name, keys.get("eval_split")) for name in held_out]


READERS: dict[str, Callable[[str, Keys, Path, Notes, Notes], tuple[Entries, Entries]]] = {
    "trl": _trl,
    "axolotl": _axolotl,
    "llamafactory": _llama_factory,
    "openrlhf": _openrlhf,
}
"""For each project what returns the entries of `data.train` and `data.eval` from its keys, and adds
what to know about them to the notes, and what has no counterpart to the lost keys."""
