"""The formats by name, and the demo's rows in each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from read_rows import FORMATS, read_rows
from transformers import AutoTokenizer
from word_rows import WHERE

import rlhf_demo
from rlhf_rows import Reader, Row


@pytest.mark.parametrize("format", FORMATS)
def test_the_demo_has_rows_of_every_format(format: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder())
    raw = [(WHERE, row) for row in rlhf_demo.rows("arithmetic", "eval", format)]
    rows = read_rows(format, raw, Reader(tokenizer))
    assert [len(found) for found in rows] == [1] * 200
    if format == "prompt":
        ((row, *_), *_) = rows
        assert tokenizer.decode(row.prompt).endswith("<|assistant|>")
        assert (row.answers, row.columns["answer"]) == ([], "32")
    if format == "preference":
        ((row, *_), *_) = rows
        assert tokenizer.decode(row.prompt).endswith("<|assistant|>")
        assert all(tokenizer.decode(a.tokens).endswith(".<|end|>") for a in row.answers)


SHARED = Path(__file__).parents[4] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.exists(), reason="the shared rows are not here")


def real_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHARED / name).read_text().splitlines()[:100]]


def real_trees(format: str, rows: list[dict[str, Any]]) -> tuple[Any, list[list[Row]]]:
    tokenizer = AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder())
    raw = [(f"{WHERE} {number}", row) for number, row in enumerate(rows)]
    return tokenizer, read_rows(format, raw, Reader(tokenizer))


@real
@pytest.mark.parametrize("name", ["gsm8k_correctness", "general", "tinystories_derived"])
def test_real_pairs_are_one_prompt_and_both_answers(name: str) -> None:
    rows = real_rows(f"dpo/{name}.eval.jsonl")
    tokenizer, trees = real_trees("preference", rows)
    for raw, (row,) in zip(rows, trees, strict=True):
        question = raw["chosen"][:-1]
        opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        assert row.prompt == tokenizer(opened, add_special_tokens=False)["input_ids"]
        for answer, side in zip(row.answers, ("chosen", "rejected"), strict=True):
            assert answer.trained is None
            reply = raw[side][-1]["content"]
            assert tokenizer.decode(answer.tokens) == reply + tokenizer.eos_token


@real
@pytest.mark.parametrize("name", ["gsm8k_correctness", "general"])
def test_real_unpaired_rows_end_their_answers(name: str) -> None:
    rows = real_rows(f"kto/{name}.eval.jsonl")
    tokenizer, trees = real_trees("unpaired", rows)
    for raw, (row,) in zip(rows, trees, strict=True):
        reply = raw["completion"]
        reply = reply if isinstance(reply, str) else reply[-1]["content"]
        assert tokenizer.decode(row.answers[0].tokens) == reply + tokenizer.eos_token
        assert row.columns["label"] is raw["label"]
