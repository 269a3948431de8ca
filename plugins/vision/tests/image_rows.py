"""Rows with images in a file, and what core makes of them."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rlhf.preview import Dataset, prepare_data
from rlhf.trainer import Example, Examples
from rlhf_devkit import read_config

DAY = date(2026, 1, 2)


def prepared(
    model: Path, rows: Sequence[Mapping[str, Any]], folder: Path, trainer: str = "sft", *words: str
) -> Dataset:
    """Return the data set of these rows, in a file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return of_file(model, file, trainer, *words)


def of_file(model: Path, file: Path, trainer: str = "sft", *words: str) -> Dataset:
    """Return the data set of a file."""
    options = ["--model", str(model), "--data", str(file), "--batch.tokens", "8192", *words]
    return prepare_data(read_config(trainer, overrides=options), DAY)


def examples(model: Path, rows: Sequence[Mapping[str, Any]], folder: Path, *words: str) -> Examples:
    """Return the examples of these rows for sft."""
    return prepared(model, rows, folder, "sft", *words).train


def tokens_of(example: Example, answer: int = 0) -> list[int]:
    """Return the token ids of a path."""
    return [*map(int, example.prompt), *map(int, example.answers[answer].tokens)]
