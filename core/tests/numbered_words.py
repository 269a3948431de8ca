"""Rows of the words w0 to w39, a tokenizer with one token per word, and trainers that read them."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import frozen
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry, TrainConfig
from rlhf.data.example import Answer, Example
from rlhf.data.tokenise import Examples, prepare
from rlhf.trainer import Trainer

WORDS = ["<unk>", "</s>", *(f"w{n}" for n in range(40))]
ROWS = [{"prompt": f"w{n}", "completion": f"w{n} w{n + 1}"} for n in range(10)]
EXPECTED = [([n + 2], [n + 2, n + 3, 1]) for n in range(10)]
"""Prompt and answer of each row as token ids."""


@frozen
class Section:
    """A trainer's section."""

    beta: float = 0.1


class Demonstrations(Trainer):
    row_format: ClassVar[str | None] = "demonstration"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


class Raw(Demonstrations):
    """Returns two answers with values of every kind, from rows without a format."""

    row_format = None

    def example(self, row: Any) -> Example:
        number = row["number"]
        answers = [Answer([3, 4, 5], [False, True, True]), Answer([6])]
        label = [[float("nan"), 1.0, 0.5], [float("nan")]]
        values = {"margin": number / 2, "rank": [1.0, 2.0], "label": label}
        inputs = {"pixels": [[number]], "image": torch.full((1, 2), number / 2)}
        return Example([2] * (number + 1), answers, values, inputs)


def word_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def write_lines(path: Path, rows: list[Any] | None = None) -> str:
    """Write a JSON lines file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    return str(path)


def examples_of(
    *entries: str | DataEntry, trainer: type[Trainer] = Demonstrations, **settings: Any
) -> Examples:
    """Tokenise the rows of `entries` under these settings."""
    train = tuple(e if isinstance(e, DataEntry) else DataEntry(path=e) for e in entries)
    config = Config(
        data=DataConfig(train=train, **{"max_tokens": 64, **settings.pop("data", {})}),
        batch=BatchConfig(**settings.pop("batch", {})),
        train=TrainConfig(seed=settings.pop("seed", 0)),
    )
    tokenizer = word_tokenizer()
    tokenizer.chat_template = settings.pop("template", tokenizer.chat_template)
    section = settings.pop("section", Section())
    return prepare(config, trainer(section, tokenizer), tokenizer, which="train")


def ids(examples: Examples) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the first answer of each example."""
    return [(list(e.prompt), list(e.answers[0].tokens)) for e in examples]
