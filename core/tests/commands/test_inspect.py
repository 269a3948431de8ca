"""`rlhf inspect`: colours, lost rows, lengths and fill, without weights."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from attrs import field, frozen
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.commands.inspect import inspect_command, show_example, show_histogram
from rlhf.config.sections import BatchConfig, Config, DataConfig, DataEntry, ModelConfig
from rlhf.data.example import Answer, Example
from rlhf.plugin import TrainerPlugin
from rlhf.request.reader import Request

TRAINER = """
from rlhf.data.example import Example
from rlhf.trainer import Trainer

class OwnTrainer(Trainer):
    row_format = "demonstration"
    def example(self, row):
        return Example(row.prompt, row.answers)
    def setup(self, run): ...
    def loss(self, batch): ...
"""
WORDS = ["<unk>", "</s>", "ask", "say", "one", "two", "three", "four"]


@frozen(kw_only=True)
class Nothing:
    """A section without settings."""


@frozen(kw_only=True)
class OwnConfig(Config):
    """The configuration that the reader would make."""

    trainer_name = "own"
    own: Nothing = field(factory=Nothing)


def word_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)


def text_of(shown: Console) -> str:
    return shown.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cache")
def test_rows_lengths_and_fill_are_shown_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "ask one", "completion": "say two"}] * 5 + [{"text": "one " * 50}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = OwnConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train=(DataEntry(path=str(tmp_path / "rows.jsonl")),), max_tokens=20),
        batch=BatchConfig(size=5, tokens=32),
    )
    (tmp_path / "own_trainer.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = TrainerPlugin(config=Nothing, trainer="own_trainer:OwnTrainer")
    shown = console()
    assert inspect_command(Request(name="own", config=config, plugin=plugin), shown) == 0
    text = text_of(shown)
    assert "6 rows; 1 too long (dropped), 16.7 %; 5 examples of 25 tokens; 15 trained on" in text
    assert f"too long: {tmp_path}/rows.jsonl line 6" in text
    assert (
        "warning: data.train: 16.7 % of the rows are dropped or cut; raise data.max_tokens" in text
    )
    assert "\x1b[2mask one\x1b[0m\x1b[32msay two </s>\x1b[0m" in text
    assert "1 step of 5 examples per epoch" in text
    assert "1 micro-batch per step, 78 % of batch.tokens 32 filled" in text


def test_answers_are_marked_and_untrained_stretches_have_their_own_colour() -> None:
    shown = console()
    example = Example(
        [2],
        [Answer([3, 4, 5], [True, False, True]), Answer([6, 7])],
        {"margin": 0.5, "rank": [1.0, 2.0]},
    )
    show_example(example, "rows.jsonl line 1", word_tokenizer(), shown)
    text = text_of(shown)
    assert "[answer 1]" in text
    assert "[answer 2]" in text
    assert "\x1b[32msay\x1b[0m\x1b[33mone\x1b[0m\x1b[32mtwo\x1b[0m" in text
    assert "margin: 0.5" in text
    assert "rank: [1, 2]" in text


def test_labels_of_tokens_follow_them() -> None:
    shown = console()
    steps = Answer([3, 4, 5, 6], [False] * 4)
    values = {"label": [[math.nan, 1.0, math.nan, 0.25]]}
    show_example(Example([2], [steps], values), "rows.jsonl line 1", word_tokenizer(), shown)
    labels = [part.split("]")[0] for part in text_of(shown).split("[label ")[1:]]
    assert labels == ["1", "0.25"]
    assert "say one\x1b[0m\x1b[1m[label 1]\x1b[0m" in text_of(shown)


def test_a_label_of_consecutive_tokens_is_shown_once() -> None:
    shown = console()
    values = {"chosen": [[1.0, 1.0, 1.0, 0.0]]}
    show_example(Example([2], [Answer([3, 4, 5, 6])], values), "row", word_tokenizer(), shown)
    labels = [part.split("]")[0] for part in text_of(shown).split("[chosen ")[1:]]
    assert labels == ["1", "0"]


def test_the_histogram_counts_every_example() -> None:
    shown = console()
    show_histogram(np.array([4, 4, 9, 30]), shown)
    counts = [int(line.split()[-1]) for line in text_of(shown).splitlines()]
    assert sum(counts) == 4


def test_no_length_is_in_two_bins_of_the_histogram() -> None:
    shown = console()
    show_histogram(np.array([10, 11, 12, 13, 14, 14]), shown)
    lines = [line.split() for line in text_of(shown).splitlines()]
    assert [(int(low), int(high), int(count)) for low, _, high, *_, count in lines] == [
        (10, 10, 1), (11, 11, 1), (12, 12, 1), (13, 13, 1), (14, 14, 2),
    ]  # fmt: skip
