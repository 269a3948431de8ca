"""Conversations that a chat template drops, refuses or renders in another order."""

import re
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, TALK, read, tokenizer_of
from transformers import AutoTokenizer

import rlhf_demo
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
        (
            {"messages": [{"role": "user", "content": [{"type": "file"}]}, TALK[1]]},
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


QUESTION = {"role": "user", "content": "two words"}
PARTS = [{"type": "text", "text": word} for word in ("two ", "words")]
FILE = {"type": "file", "file": {"file_id": "a"}}
OWN_PARTS = CHATML.replace(
    "m['content'] +",
    "(m['content'] if m['content'] is string else m['content'] | map(attribute='text')"
    " | map('upper') | join('|')) +",
)
"""A template that renders parts, in its own way."""
INTERPOLATED = CHATML.replace("+ m['content'] +", "~ m['content'] ~")


def prompt_of(template: str | None, *messages: Any) -> str:
    """The prompt of the last turn, as text."""
    tokenizer = demo_tokenizer() if template is None else tokenizer_of("bytes", template)
    (row,) = read(tokenizer, messages=[*messages, TALK[1]])
    return tokenizer.decode(row.prompt)


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(rlhf_demo.base_model_folder())


@pytest.mark.parametrize("template", [None, LLAMA3, CHATML, INTERPOLATED])
def test_parts_of_text_are_joined_for_a_template_of_text(template: str | None) -> None:
    joined = prompt_of(template, {**QUESTION, "content": PARTS})
    assert "two words" in joined
    assert joined == prompt_of(template, QUESTION)
    assert prompt_of(template, {**QUESTION, "content": ["two ", "words"]}) == joined


def test_reasoning_that_a_template_leaves_out_of_earlier_turns_is_no_error() -> None:
    template = OWN_PARTS.replace(
        "map(attribute='text')", "selectattr('type', 'eq', 'text') | map(attribute='text')"
    )
    thought = {"type": "thinking", "thinking": "two ducks"}
    turn = {"role": "assistant", "content": [thought, *PARTS]}
    tokenizer = tokenizer_of("bytes", template)
    (row,) = read(tokenizer, messages=[QUESTION, turn, QUESTION, TALK[1]])
    assert "TWO |WORDS" in tokenizer.decode(row.answers[0].tokens)


def test_a_template_that_renders_parts_gets_them() -> None:
    assert "TWO |WORDS" in prompt_of(OWN_PARTS, {**QUESTION, "content": PARTS})


@pytest.mark.parametrize("template", [None, LLAMA3, INTERPOLATED])
def test_a_part_that_would_be_printed_as_a_python_value_is_an_error(template: str | None) -> None:
    with pytest.raises(RLHFError) as caught:
        prompt_of(template, {**QUESTION, "content": [*PARTS, FILE]})
    assert str(caught.value) == (
        "rows.jsonl line 1: `content` of message 0 (role user) has a part of type 'file', which "
        "the chat template cannot render; remove the row or set data.chat_template"
    )


def test_a_part_that_the_template_drops_is_an_error() -> None:
    template = OWN_PARTS.replace("m['content'] | map(", "m['content'][:2] | map(")
    with pytest.raises(RLHFError) as caught:
        prompt_of(template, {**QUESTION, "content": [*PARTS, FILE]})
    assert str(caught.value) == (
        "rows.jsonl line 1: the chat template drops part 2 of `content` of message 0 (role user); "
        "change the row or set data.chat_template"
    )


@pytest.mark.parametrize("template", [None, LLAMA3, CHATML, tokenizers.CHATML])
@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user"}])
def test_a_message_without_content_is_an_error(template: str | None, message: Any) -> None:
    with pytest.raises(RLHFError) as caught:
        prompt_of(template, message)
    assert str(caught.value) == (
        "rows.jsonl line 1: message 0 (role user) has no `content`; give it text, which may be "
        "empty, or remove the row"
    )


def test_null_beside_tool_calls_is_not_printed_as_none() -> None:
    template = INTERPOLATED.replace(
        "~ '<|im_end|>", "~ (m.tool_calls | tojson if m.tool_calls else '') ~ '<|im_end|>"
    )
    assert "tool_calls" in template
    prompt = prompt_of(template, QUESTION, TOOL_CALL, {"role": "tool", "content": "4"})
    assert "None" not in prompt
    assert prompt == prompt_of(
        template, QUESTION, {**TOOL_CALL, "content": ""}, {"role": "tool", "content": "4"}
    )
