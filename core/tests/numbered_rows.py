"""Numbered rows of different lengths, without a tokenizer, and the order of a run over them."""

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry, TrainConfig
from rlhf.data.example import Answer, Example
from rlhf.data.order import RunOrder
from rlhf.data.tokenise import Examples, prepare
from rlhf.trainer import Trainer

NUM_ROWS = 53


class Numbers(Trainer):
    """Rows of different lengths."""

    row_format = None

    def example(self, row: Any) -> Example:
        if row["number"] == self.config.deadly:
            return Example([1], [Answer([1])], {"weight": 1.0})
        length = 1 + row["number"] * 7 % 13
        return Example([row["number"]] * 2, [Answer([row["number"]] * length)], {"weight": 1.0})

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


@frozen
class Section:
    """A section without meaning."""

    deadly: int = -1


class NoTokenizer:
    """Raw rows need none; the cache reads its vocabulary."""

    is_fast = False
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    chat_template = None
    eos_token_id = bos_token_id = bos_token = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    all_special_ids: list[int] = []  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, text: Any, **keywords: Any) -> dict[str, list[int]]:
        return {"input_ids": [0]}


def config_in(folder: Path) -> Config:
    """A run on rows in this folder, ten a step."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"number": n}) + "\n" for n in range(NUM_ROWS)))
    return Config(
        data=DataConfig(train=(DataEntry(path=str(path)),)),
        batch=BatchConfig(size=10, tokens=40),
        train=TrainConfig(seed=4),
    )


def numbered_examples(config: Config) -> Examples:
    """The rows as trees."""
    return prepare(config, Numbers(Section(), None), NoTokenizer(), which="train")


def order(
    examples: Examples, config: Config, rank: int = 0, ranks: int = 1, **keywords: Any
) -> RunOrder:
    return RunOrder(examples=examples, config=config, rank=rank, ranks=ranks, **keywords)
