"""Conversations that a chat template drops, refuses or renders in another order."""

import re
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, TALK, read, tokenizer_of

from rlhf.errors import RLHFError
from rlhf.model import tokenizer as tokenizers

TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}


DROPPING = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') and m.content %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that leaves out everything but the texts of users and assistants."""


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"messages": [{"role": "tool", "content": "4"}, *TALK]},
            "the chat template drops `content` of message 0 (role tool); change the row or set "
            "data.chat_template",
        ),
        (
            {"messages": [TALK[0], TOOL_CALL, *TALK[2:]]},
            "the chat template drops `tool_calls` of message 1 (role assistant); change the row or "
            "set data.chat_template",
        ),
        (
            {"messages": TALK, "tools": [{"type": "function"}]},
            "the chat template ignores `tools`; remove them or set data.chat_template",
        ),
    ],
)
def test_what_a_template_drops_is_an_error(columns: Any, message: str) -> None:
    with pytest.raises(RLHFError) as caught:
        read(tokenizer_of("bytes", DROPPING), **columns)
    assert str(caught.value) == f"rows.jsonl line 1: {message}"


def test_content_that_a_template_rewrites_is_not_dropped() -> None:
    template = DROPPING.replace("+ m.content +", "+ (m.content | tojson) +")
    (row,) = read(
        tokenizer_of("bytes", template), messages=[{**TALK[0], "content": 'a "b"'}, TALK[1]]
    )
    assert row.answers


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"messages": [TALK[0], TOOL_CALL]}, "chatml has no form for tool calls"),
        ({"messages": [{"role": "user", "content": None}, TALK[1]]}, "a message has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[1]]},
            "chatml has no form for a part that is not text",
        ),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "chatml has no form for tools"),
    ],
)
def test_the_template_chatml_refuses_what_it_cannot_render(columns: Any, message: str) -> None:
    with pytest.raises(RLHFError, match=re.escape(message)):
        read(tokenizer_of("bytes", tokenizers.CHATML), **columns)


def test_the_template_chatml_joins_parts_of_text() -> None:
    tokenizer = tokenizer_of("bytes", tokenizers.CHATML)
    parts = [{"type": "text", "text": word} for word in ("two ", "words")]
    (row,) = read(tokenizer, messages=[{"role": "user", "content": parts}, TALK[1]])
    (plain,) = read(tokenizer, messages=[{"role": "user", "content": "two words"}, TALK[1]])
    assert row.prompt == plain.prompt


def test_a_conversation_without_a_template_names_the_setting() -> None:
    with pytest.raises(RLHFError) as caught:
        read(tokenizer_of("bytes"), messages=TALK)
    assert str(caught.value) == (
        "rows.jsonl line 1: this is a conversation, but the tokenizer has no chat template; "
        "set data.chat_template to a file or to chatml"
    )


def test_a_template_that_refuses_names_the_row_and_its_reason() -> None:
    with pytest.raises(RLHFError) as caught:
        read(
            tokenizer_of("bytes", GEMMA), messages=[{"role": "system", "content": "be kind"}, *TALK]
        )
    assert str(caught.value) == (
        "rows.jsonl line 1: the chat template refuses the conversation (System role not "
        "supported); change the row or set data.chat_template"
    )


def test_a_turn_that_cannot_be_located_is_an_error() -> None:
    backwards = (
        "{% if add_generation_prompt %}{{ 'answer now' }}{% endif %}"
        "{% for m in messages | reverse %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    )
    with pytest.raises(RLHFError) as caught:
        read(tokenizer_of("bytes", backwards), messages=TALK)
    assert str(caught.value) == (
        "rows.jsonl line 1: cannot locate the assistant's turn in the rendered conversation; put "
        "{% generation %} marks around it in a template file and name the file in "
        "data.chat_template"
    )


def test_rows_of_another_format_are_refused_with_their_columns() -> None:
    tokenizer = tokenizer_of("bytes", CHATML)
    with pytest.raises(RLHFError) as caught:
        read(tokenizer, question="1 + 1", answer="2")
    assert str(caught.value) == (
        "rows.jsonl line 1: a row needs `messages`, `text`, or `prompt` and `completion`, "
        "but this one has `question`, `answer`; rename columns with `columns` in data"
    )
    with pytest.raises(RLHFError) as caught:
        read(tokenizer, messages=[{"speaker": "me", "text": "hi"}])
    assert str(caught.value) == (
        'rows.jsonl line 1: message 0 of `messages` has no `role`: {"speaker": "me", "text": "hi"}'
    )
