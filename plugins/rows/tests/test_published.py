"""Rows as well-known data sets publish them, where the real files are."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

import rlhf_demo
from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry
from rlhf.data.example import Example
from rlhf.data.tokenise import prepare
from rlhf.trainer import Trainer
from rlhf_rows import Row

FORMATS = Path(__file__).parents[4] / "shared" / "data" / "formats"
real = pytest.mark.skipif(not FORMATS.exists(), reason="the shared rows are not here")
pytestmark = pytest.mark.usefixtures("cache")


class Plain(Trainer):
    """Takes the rows of any format as they come."""

    seen: ClassVar[list[Row]] = []

    def example(self, row: Any) -> Example:
        self.seen.append(row)
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


def made(format: str, entry: DataEntry) -> tuple[list[Row], Any, Any]:
    """The rows, the examples and the tokenizer of one entry, with the demo's base model."""
    trainer_class = type("OfFormat", (Plain,), {"row_format": format, "seen": []})
    data = DataConfig(train=(entry,), max_tokens=1 << 14, processes=1)
    config = Config(data=data, batch=BatchConfig(tokens=1 << 14))
    tokenizer = AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder())
    trainer = trainer_class(None, tokenizer)
    examples = prepare(config, trainer, tokenizer, which="train")
    return trainer.seen, examples, tokenizer


@real
def test_the_real_hh_pairs_are_cut_after_the_last_shared_speaker() -> None:
    path = FORMATS / "hh_raw.jsonl"
    rows, _, tokenizer = made("preference", DataEntry(path=str(path)))
    published = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(published) == 30
    for row, pair in zip(rows, published, strict=True):
        prompt = tokenizer.decode(row.prompt)
        assert prompt.endswith("\n\nAssistant:")
        for answer, name in zip(row.answers, ("chosen", "rejected"), strict=True):
            assert prompt + tokenizer.decode(answer.tokens) == pair[name] + tokenizer.eos_token


@real
def test_the_real_gsm8k_needs_two_renames() -> None:
    names = {"prompt": "question", "completion": "answer"}
    entry = DataEntry(path=str(FORMATS / "gsm8k_raw.jsonl"), columns=names)
    rows, examples, tokenizer = made("demonstration", entry)
    assert len(examples) == 200
    assert tokenizer.decode(rows[0].prompt).startswith("Weng earns $12 an hour")
    assert tokenizer.decode(rows[0].answers[0].tokens).endswith("#### 10" + tokenizer.eos_token)
