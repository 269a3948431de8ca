"""The special token that a chat template writes after any answer is found, by which answers end."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf.model.tokenizer import end_tokens, turn_end

END = "<end>"
TURN = "{% for m in messages %}{{ m.role }}: {{ CONTENT }}<end>\n{% endfor %}"
TEXT = TURN.replace("CONTENT", "m.content")
PARTS = TURN.replace("CONTENT", "m.content | selectattr('type') | map(attribute='text') | join")
TEMPLATES = {
    "text": (TEXT, True),
    "parts": (PARTS, True),
    "a system message first": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + TEXT, True,
    ),
    "several by name": ({"default": TEXT, "tool_use": "other"}, True),
    "a token before a line": (TEXT.replace("<end>\n", "<end>\nthe end"), True),
    "no special token": (TEXT.replace(END, "."), False),
    "no answers": ("{{ messages[0].content }}<end>", False),
    "a template that refuses": ("{{ raise_exception('no') }}", False),
    "a template that fails": ("{{ 1 / 0 }}", False),
    "none": (None, False),
}  # fmt: skip


def tokenizer_of(template: Any) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["</s>", END, "a"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=[END],
        chat_template=template,
    )  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_after_an_answer_is_found(name: str) -> None:
    template, ends = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    assert turn_end(tokenizer) == (1 if ends else None)
    assert end_tokens(tokenizer) == ([1, 0] if ends else [0])
