"""The data sets of another project become entries of `data.train` and `data.eval`."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf.cli import is_local
from rlhf.errors import RLHFError
from rlhf_migrate.arguments import located
from rlhf_migrate.foreign import PROJECTS, Rule
from rlhf_migrate.rules import Migration, apply, short

Keys = Mapping[str, Any]
Entries = list[Any]

FIRST_ROWS = re.compile(r"\[:([1-9]\d*)\]")
"""The part of a split that `limit` of an entry expresses."""
FILES = (".json", ".jsonl", ".ndjson", ".gz", ".csv", ".parquet", ".arrow")
"""Ends of the names of files; the name of a data set on the hub may have a dot, too."""
BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""What `datasets` has as the path of a data set that consists of files."""
LLAMA_FACTORY_COLUMNS = {
    "instruction": "prompt", "input": "query", "output": "response", "conversations": "messages",
    **{
        each: each
        for each in ("history", "system", "tools", "images", "chosen", "rejected", "kto_tag")
    },
}  # fmt: skip
"""Keys of `columns` in LLaMA-Factory's dataset_info.json, by the names of our columns."""
OTHER_HUBS = ("ms_hub_url", "om_hub_url")
"""Keys of LLaMA-Factory's dataset_info.json for ModelScope and OpenMind."""


def _entries(
    migration: Migration, label: str, source: Keys, folder: Path, **options: Any
) -> Entries:
    """Return an entry for each file of a data set, or one for its path. `source` has the keys path,
    data_dir, data_files and split of the library `datasets`; `label` names it in remarks."""
    split = str(source.get("split") or "train")
    name = split.partition("[")[0]
    rows = split.removeprefix(name)
    paths = _paths(migration, label, source, folder, split=name)
    if Path(paths[0]).suffix in FILES:
        first = FIRST_ROWS.fullmatch(rows) if len(paths) == 1 else None
        if first:
            options["limit"] = min(int(first[1]), options.get("limit") or int(first[1]))
        by_split = isinstance(source.get("data_files"), Mapping)
        if (rows and not first) or (name != "train" and not by_split):
            note = "a file has no splits; `limit` of its entry chooses its first rows"
            migration.lost[f"{label}: split {split}"] = note
    elif split != "train":
        options["split"] = split
    kept = {key: value for key, value in options.items() if value}
    return [{"path": path, **kept} if kept else path for path in paths]


def _paths(
    migration: Migration, label: str, source: Keys, folder: Path, *, split: str
) -> list[str]:
    """Return the files of a split, or the path if the data set names none. Raises RLHFError if it
    has files of other splits only."""
    path = str(source.get("path"))
    within = {key: source[key] for key in ("data_dir", "data_files") if source.get(key)}
    if not within:
        return [path]
    if path not in BUILDERS and not is_local(path) and not located(path, folder).exists():
        for key, value in within.items():
            note = "parts of a data set on the hub cannot be chosen; name downloaded files"
            migration.lost[f"{label}: {key} {short(value)}"] = note
        return [path]
    files = within.get("data_files")
    if isinstance(files, Mapping):
        if split not in files:
            raise RLHFError(f"{label}: data_files has no split {split}; it has {', '.join(files)}")
        files = files[split]
    place = Path("" if path in BUILDERS else path, str(within.get("data_dir", "")))
    return [str(place / str(file)) for file in listed(files)] or [str(place)]


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


def _report(migration: Migration, label: str, keys: Keys, rules: Mapping[str, Rule]) -> None:
    """Carry out the rules of the keys of a data set, and list the keys that have none."""
    for name, value in keys.items():
        key = f"{label}: {name}"
        if name in rules:
            apply(migration, key, value, rules[name], key)
        else:
            migration.unknown.append(key)


def _check_names(migration: Migration, label: str, names: Keys) -> None:
    """Add a note if messages have other names for their parts than those that are read."""
    renamed = {ours: theirs for ours, theirs in names.items() if ours != theirs}
    if renamed not in ({}, {"role": "from", "content": "value"}):
        migration.notes[f"{label}: {short(renamed)}"] = (
            "messages have role and content here, or from and value; rename them in the rows"
        )


def _trl(migration: Migration, variant: str, keys: Keys, folder: Path) -> tuple[Entries, Entries]:
    def read(each: Keys) -> Entries:
        _report(migration, "datasets", each, PROJECTS["trl"].data_set)
        return _entries(migration, "datasets", each, folder, subset=each.get("name"))

    def split(key: str, default: str) -> Entries:
        source = {"path": name, "split": keys.get(key, default)}
        return _entries(migration, key, source, folder, subset=keys.get("dataset_config"))

    name = keys.get("dataset_name")
    if not name or keys.get("datasets"):
        return [entry for each in _data_sets(keys, "datasets") for entry in read(each)], []
    train = split("dataset_train_split", "train")
    if keys.get("eval_strategy", keys.get("evaluation_strategy", "no")) in ("no", False):
        return train, []
    return train, split("dataset_test_split", "test")


def _axolotl(
    migration: Migration, variant: str, keys: Keys, folder: Path
) -> tuple[Entries, Entries]:
    def read(each: Keys, label: str) -> Entries:
        kind = each.get("type")
        fields = each if not isinstance(kind, Mapping) else {**each, **kind}
        names = "messages tools instruction input output prompt completion chosen rejected label"
        columns = _renamed(
            (name, fields.get(f"field_{name}")) for name in [*names.split(), "system"]
        )
        columns |= _renamed([("text", fields.get("field"))])
        if columns.get("messages") == "conversations":
            del columns["messages"]  # It is read under this name too.
        _report(migration, label, fields, PROJECTS["axolotl"].data_set)
        mapping = each.get("message_property_mappings")
        parts = {name: each.get(f"message_field_{name}") or name for name in ("role", "content")}
        mapping = mapping if isinstance(mapping, Mapping) else {}
        _check_names(migration, label, {**parts, **mapping})
        return _entries(migration, label, each, folder, subset=each.get("name"), columns=columns)

    if (template := keys.get("chat_template")) not in (None, "tokenizer_default", "jinja"):
        note = PROJECTS["axolotl"].data_set["chat_template"].note
        migration.notes[f"chat_template {template}"] = note
    train, held_out = (
        [entry for each in _data_sets(keys, key) for entry in read(each, key)]
        for key in ("datasets", "test_datasets")
    )
    return train, held_out


def _llama_factory(
    migration: Migration, variant: str, keys: Keys, folder: Path
) -> tuple[Entries, Entries]:
    place = located(str(keys.get("dataset_dir", "data")), folder)
    try:
        text = (place / "dataset_info.json").read_text(encoding="utf-8") if place.is_dir() else "{}"
        known = json.loads(text)
    except (OSError, ValueError) as error:
        raise RLHFError(f"cannot read {place}/dataset_info.json: {error}") from error

    def read(name: str) -> Entries:
        about = known.get(name)
        if about is None:
            migration.notes[f"dataset {name}"] = (
                "is not in a dataset_info.json that was found; replace it by its file"
            )
            return _entries(migration, name, {"path": name}, folder, limit=keys.get("max_samples"))
        theirs, tags = about.get("columns") or {}, about.get("tags") or {}
        columns = _renamed((ours, theirs.get(key)) for ours, key in LLAMA_FACTORY_COLUMNS.items())
        if columns.get("conversations") == "messages":
            del columns["conversations"]
        label = f"dataset {name}"
        # Other places of the same rows are not used there.
        unused = OTHER_HUBS if "hf_hub_url" in about else ()
        parts = {
            key: value for key, value in about.items() if key not in ("columns", "tags", *unused)
        }
        _report(migration, label, parts | theirs | tags, PROJECTS["llamafactory"].data_set)
        tagged = {
            each: tags[f"{each}_tag"] for each in ("role", "content") if f"{each}_tag" in tags
        }
        _check_names(migration, label, tagged)
        source: dict[str, Any] = {"path": name, "split": about.get("split")}
        if hub := about.get("hf_hub_url"):
            source |= {"path": hub, "data_dir": about.get("folder")}
        elif file := about.get("file_name"):
            source["path"] = place / file
        return _entries(
            migration,
            label,
            source,
            folder,
            subset=about.get("subset"),
            limit=keys.get("max_samples", about.get("num_samples")),
            columns=columns,
        )

    if "enable_thinking" in keys:
        migration.notes["enable_thinking"] = (
            "set it in data.chat_template_kwargs if the template reads it"
        )
    train, held_out = (
        [entry for name in names_in(keys.get(key)) for entry in read(name)]
        for key in ("dataset", "eval_dataset")
    )
    return train, held_out


def _openrlhf(
    migration: Migration, variant: str, keys: Keys, folder: Path
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
        migration.notes["apply_chat_template"] = (
            "the template is used for lists of messages; rows of plain text are used as they are"
        )
    text = keys.get("input_template", None if variant in ("dpo", "rm") else "User: {}\nAssistant: ")
    if text and not templated and variant != "prm":
        migration.notes[f"input_template {text!r}"] = (
            "prompts are used as they are; put it into the rows"
        )
    if keys.get("dataset_probs"):
        migration.notes["dataset_probs"] = (
            "there the share of the steps, here `weight` says how often rows are used per epoch"
        )

    def read(key: str, split: Any) -> Entries:
        entries = []
        for name in names_in(keys.get(key)):
            path, _, within = name.partition("@")
            source = {"path": path, "data_dir": within, "split": split}
            entries += _entries(
                migration, key, source, folder, limit=keys.get("max_samples"), columns=columns
            )
        return entries

    train_split = keys.get("dataset_split", keys.get("train_split"))
    return read("dataset", train_split), read("eval_dataset", keys.get("eval_split"))


READERS: dict[str, Callable[[Migration, str, Keys, Path], tuple[Entries, Entries]]] = {
    "trl": _trl,
    "axolotl": _axolotl,
    "llamafactory": _llama_factory,
    "openrlhf": _openrlhf,
}
"""For each project what returns the entries of `data.train` and `data.eval` from its keys, and adds
remarks on them to the migration."""
