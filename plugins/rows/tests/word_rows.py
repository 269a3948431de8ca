"""Rows read with a tokenizer that has one token per word, and shown as words."""

import json
from pathlib import Path
from typing import Any

import pytest
from read_rows import read_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.sections import Config, DataConfig, DataEntry
from rlhf.data.example import Example
from rlhf.data.examples import Examples
from rlhf.data.tokenise import prepare
from rlhf.errors import RLHFError
from rlhf.trainer import Trainer
from rlhf_rows import Reader, Row

SPECIAL = ["<unk>", "</s>", "<user>", "<assistant>", "<system>", "<step>"]
WORDS = ["say", "one", "two", "three", "four", "five", "Human:", "Assistant:", ".", ";", "add"]
TEMPLATE = (
    "{% if tools %}{{ 'add ' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' ' }}"
    "{% if m.role == 'assistant' %}{{ '</s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
WHERE = "rows.jsonl line 1"


def tokenizer_of(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per word."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(".", "isolated"),
            pre_tokenizers.Split(";", "isolated"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=template,
    )


TOKENIZER = tokenizer_of()


def read(format: str, section: Any = None, **columns: Any) -> list[Row]:
    (rows,) = read_rows(format, [(WHERE, columns)], Reader(TOKENIZER, section=section))
    return rows


def words(ids: list[int]) -> str:
    return " ".join(TOKENIZER.convert_ids_to_tokens(ids))


def texts(row: Row) -> list[str]:
    """The prompt, then each answer with what is not trained on in brackets."""
    out = [words(row.prompt)]
    for answer in row.answers:
        mask = answer.trained or [True] * len(answer.tokens)
        tokens = TOKENIZER.convert_ids_to_tokens(list(answer.tokens))
        out.append(" ".join(t if m else f"[{t}]" for t, m in zip(tokens, mask, strict=True)))
    return out


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class OfFormat(Trainer):
    """Takes the rows of any format as they come."""

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...
    def loss(self, batch: Any) -> Any: ...


def made(
    format: str,
    rows: list[dict[str, Any]],
    path: Path,
    *,
    trainer: type[Trainer] = OfFormat,
    section: Any = None,
    **data: Any,
) -> Examples:
    """The examples of rows that are written to `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = type("OfFormat", (trainer,), {"row_format": format})
    config = Config(data=DataConfig(train=(DataEntry(path=str(path)),), **data))
    return prepare(config, kind(section, TOKENIZER), TOKENIZER, which="train")


def refusal(format: str, section: Any = None, **columns: Any) -> str:
    """The error's text without the name of the row, which every one begins with."""
    with pytest.raises(RLHFError) as caught:
        read(format, section, **columns)
    text = str(caught.value)
    assert text.startswith(f"{WHERE}: ")
    return text.removeprefix(f"{WHERE}: ")
