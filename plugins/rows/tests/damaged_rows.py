"""Rows of all formats with another JSON value at some of their places."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from chat_templates import CHATML, GEMMA, TOOLS, tokenizer_of
from hypothesis import strategies as st
from read_rows import read_rows

from rlhf.data.files import parse_object
from rlhf.errors import RLHFError
from rlhf_rows import Reader, Row

USER = {"role": "user", "content": "What is two?"}
GOOD = {"role": "assistant", "content": "one and one"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BASES: list[tuple[str, dict[str, Any]]] = [
    ("demonstration", {"messages": [USER, CALLING, {"role": "tool", "content": "4"}, GOOD],
                       "tools": [TOOL], "system": "be kind", "chat_template_kwargs": {"a": 1}}),
    ("demonstration", {"prompt": [USER], "completion": [{**GOOD, "weight": 1}]}),
    ("demonstration", {"prompt": "What is two?", "completion": "one and one"}),
    ("demonstration", {"text": "one and one"}),
    ("demonstration", {"instruction": "add", "input": "two", "output": "four", "system": "be",
                       "history": [["hello", "yes"]]}),
    ("demonstration", {"conversations": [{"from": "human", "value": "two"},
                                         {"from": "gpt", "value": "four"}], "tools": "[]"}),
    ("preference", {"prompt": [USER], "chosen": [GOOD], "rejected": [USER, {**GOOD, "content": [
        {"type": "text", "text": "no"}]}], "margin": 0.5}),
    ("preference", {"prompt": "two words", "chosen": "one", "rejected": "no", "margin": 1}),
    ("preference", {"prompt": "two", "answers": ["one", [GOOD]], "scores": [1.5, 2]}),
    ("preference", {"messages": [USER, GOOD], "rejected_response": "no"}),
    ("prompt", {"prompt": [USER], "tools": [TOOL], "answer": "two"}),
    ("prompt", {"prompt": "What is two?"}),
    ("unpaired", {"prompt": [USER], "completion": [GOOD], "label": True}),
    ("unpaired", {"messages": [USER, {"role": "assistant", "function_call": {
        "name": "add", "arguments": "{}"}}], "kto_tag": False, "functions": [TOOL["function"]]}),
]  # fmt: skip
READERS = [Reader(tokenizer_of("bytes", template)) for template in (CHATML, GEMMA, TOOLS)]
WORDS = ["user", "assistant", "system", "tool", "gpt", "text", "image", "[", "[{", "{}", "null",
         '[{"role": "user"}]', "<image>", "1e999"]  # fmt: skip
KEYS = ["role", "content", "from", "value", "tool_calls", "function", "arguments", "type", "text",
        "messages", "prompt", "chosen", "system", "tools", "images", "history", "label", "weight",
        "name"]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS)
    | st.just(10**400)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every key and item in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (key,)
        if isinstance(item, dict | list):
            yield from ((key, *rest) for rest in places(item))


@st.composite
def damaged_rows(
    draw: st.DrawFn, bases: list[tuple[str, dict[str, Any]]] = BASES
) -> tuple[str, dict[str, Any]]:
    """A row of a format with another JSON value at some of its places."""
    format, base = draw(st.sampled_from(bases))
    row = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([*places(row), (draw(st.sampled_from(KEYS)),)]))
        parent: Any = row
        for key in path:
            parent = parent[key]
        parent[last] = draw(VALUES)
    return format, row


def check(format: str, row: dict[str, Any], reader: Reader) -> None:
    """Read the row as from a file of JSON lines."""
    text = json.dumps(row)
    try:
        (made,) = read_rows(format, [("rows.jsonl line 1", parse_object(text))], reader)
        refused = ""
    except RLHFError as error:
        made, refused = [], str(error)
    assert "\n" not in refused
    assert len(refused) < 1000
    for each in made:
        assert isinstance(each, Row)
        sizes = [len(answer.tokens) for answer in each.answers]
        assert sizes == [
            len(answer.tokens if answer.trained is None else answer.trained)
            for answer in each.answers
        ]
