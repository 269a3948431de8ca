"""`rlhf inspect`: colours, lost rows, lengths and fill, without weights."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.trainer import Answer, Example
from rlhf_devkit import LIKELIHOOD, read_config, write_rows
from rlhf_tools.inspect import inspect_command, show_example, show_histogram

WORDS = ["<unk>", "</s>", "ask", "say", "one", "two", "three", "four"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)


def text_of(shown: Console) -> str:
    return shown.file.getvalue()  # type: ignore[attr-defined]


def test_rows_lengths_and_fill_are_shown_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    word_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "ask one", "completion": "say two"}] * 5 + [{"text": "one " * 50}]
    words = ["--model", str(tmp_path / "model")]
    words += ["--data", str(write_rows(tmp_path / "rows.jsonl", rows)), "--data.max_tokens", "20"]
    words += ["--batch.size", "5", "--batch.tokens", "32"]
    shown = console()
    assert inspect_command(read_config(LIKELIHOOD, overrides=words), shown) == 0
    text = text_of(shown)
    assert "6 rows; 1 too long (dropped), 16.7 %; 5 examples of 25 tokens; 15 trained on" in text
    assert f"too long: {tmp_path}/rows.jsonl line 6" in text
    assert (
        "warning: data.train: 16.7 % of the rows are dropped or cut; raise data.max_tokens" in text
    )
    assert "\x1b[2mask one\x1b[0m\x1b[32msay two </s>\x1b[0m" in text
    assert "1 step of 5 examples per epoch" in text
    assert "1 micro-batch per step, 78 % of batch.tokens 32 filled" in text


def test_a_token_that_is_repeated_is_shown_once_with_its_number() -> None:
    shown = console()
    example = Example([2, *[4] * 20, 3], [Answer([5])])
    show_example(example, "rows.jsonl line 1", {}, word_tokenizer(), shown)
    assert "\x1b[2mask\x1b[0m\x1b[2mone x 20\x1b[0m\x1b[2msay\x1b[0m" in text_of(shown)


def test_answers_are_marked_and_untrained_stretches_have_their_own_colour() -> None:
    shown = console()
    example = Example(
        [2],
        [Answer([3, 4, 5], [True, False, True]), Answer([6, 7])],
        {"margin": 0.5, "rank": [1.0, 2.0]},
    )
    kinds = {"margin": "example", "rank": "answer"}
    show_example(example, "rows.jsonl line 1", kinds, word_tokenizer(), shown)
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
    example = Example([2], [steps], values)
    show_example(example, "rows.jsonl line 1", {"label": "token"}, word_tokenizer(), shown)
    labels = [part.split("]")[0] for part in text_of(shown).split("[label ")[1:]]
    assert labels == ["1", "0.25"]
    assert "say one\x1b[0m\x1b[1m[label 1]\x1b[0m" in text_of(shown)


def test_a_label_of_consecutive_tokens_is_shown_once() -> None:
    shown = console()
    values = {"chosen": [[1.0, 1.0, 1.0, 0.0]]}
    example = Example([2], [Answer([3, 4, 5, 6])], values)
    show_example(example, "row", {"chosen": "token"}, word_tokenizer(), shown)
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
