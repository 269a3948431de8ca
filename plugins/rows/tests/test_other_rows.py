"""Rows as other projects write them become those of our formats."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, TOOLS, tokenizer_of
from read_rows import read_rows

from rlhf.errors import RLHFError
from rlhf_rows import Reader, Row

SYSTEM = {"role": "system", "content": "be kind"}
TALK = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "one and one"},
]
WORSE = {"role": "assistant", "content": "yes, no"}


def theirs(*messages: dict[str, str]) -> list[dict[str, str]]:
    """Messages as ShareGPT writes them."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[each["role"]], "value": each["content"]} for each in messages]


def read(format: str, row: dict[str, Any], template: str = CHATML) -> list[Row]:
    reader = Reader(tokenizer_of("bytes", template))
    return read_rows(format, [("rows.jsonl line 1", row)], reader)[0]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sharegpt": ("demonstration", {"conversations": theirs(*TALK)}, {"messages": TALK}),
    "sharegpt with our roles": ("demonstration", {"conversations": TALK}, {"messages": TALK}),
    "sharegpt with a system column": (
        "demonstration",
        {"conversations": theirs(*TALK), "system": "be kind"},
        {"messages": [SYSTEM, *TALK]},
    ),
    "messages and a system column": (
        "demonstration",
        {"messages": [SYSTEM, *TALK], "system": "be kind "},
        {"messages": [SYSTEM, *TALK]},
    ),
    "sharegpt pair": (
        "preference",
        {
            "conversations": theirs(*TALK[:1]),
            "chosen": theirs(TALK[1])[0],
            "rejected": theirs(WORSE)[0],
        },
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [WORSE]},
    ),
    "sharegpt with kto_tag": (
        "unpaired",
        {"conversations": theirs(*TALK), "kto_tag": False},
        {"messages": TALK, "label": False},
    ),
    "alpaca": (
        "demonstration",
        {"instruction": "What is", "input": "two?", "output": "one and one", "system": "be kind"},
        {
            "prompt": [SYSTEM, {"role": "user", "content": "What is\ntwo?"}],
            "completion": TALK[1:],
        },
    ),
    "alpaca with history": (
        "demonstration",
        {"instruction": "and four?", "input": "", "output": "two", "history": [["hello", "yes"]]},
        {
            "prompt": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "and four?"},
            ],
            "completion": "two",
        },
    ),
    "ms-swift pair": (
        "preference",
        {"messages": [SYSTEM, *TALK], "rejected_response": "yes, no"},
        {"prompt": [SYSTEM, TALK[0]], "chosen": TALK[1:], "rejected": [WORSE]},
    ),
    "alpaca pair": (
        "preference",
        {"instruction": "What is two?", "chosen": "one and one", "rejected": "yes, no"},
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [WORSE]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_another_project_is_one_of_ours(name: str) -> None:
    format, row, ours = CASES[name]
    (read_row,), (expected,) = read(format, row), read(format, ours)
    assert read_row.prompt == expected.prompt
    assert read_row.answers == expected.answers
    for key in ("label", "ranks"):
        assert read_row.columns.get(key) == expected.columns.get(key)


def test_function_calls_of_sharegpt_are_tool_calls() -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    row = {
        "conversations": [
            {"from": "human", "value": "What is two?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "two"},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    first, last = read("demonstration", row, TOOLS)
    tokenizer = tokenizer_of("bytes", TOOLS)
    assert '"name": "add"' in tokenizer.decode(first.answers[0].tokens)
    assert "<|im_start|>tool\n4<|im_end|>" in tokenizer.decode(last.prompt)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            {"from": "moderator", "value": "stop"},
            "`from` of message 0 of `messages` is 'moderator'; use one of human, user, prompter, "
            "gpt, chatgpt, assistant, model, bot, ai, function_call, tool_call, system, tool, "
            "observation, tool_response, function_response",
        ),
        (
            {"from": "function_call", "value": "add(2)"},
            "message 0 of `messages` is a function_call, but its `value` is not JSON",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_an_error(message: dict[str, str], error: str) -> None:
    with pytest.raises(RLHFError) as caught:
        read("demonstration", {"conversations": [message, *theirs(*TALK)]})
    assert str(caught.value) == f"rows.jsonl line 1: {error}"


RAW = Path(__file__).parents[4] / "shared" / "data" / "formats" / "sharegpt_dpo_raw.json"


@pytest.mark.skipif(not RAW.exists(), reason="the shared rows are not here")
def test_real_pairs_of_sharegpt_load_as_they_are() -> None:
    for raw in json.loads(RAW.read_text())[:20]:
        (row,) = read("preference", raw)
        tokenizer = tokenizer_of("bytes", CHATML)
        answers = [tokenizer.decode(answer.tokens) for answer in row.answers]
        assert answers == [raw[name]["value"] + "<|im_end|>" for name in ("chosen", "rejected")]
