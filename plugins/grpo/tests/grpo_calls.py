"""Runs whose policy, a model with random weights, calls tools: every second turn counts as a call
of `add`, since such a model writes none."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from rlhf_devkit import tiny
from rlhf_devkit.curves import Metrics
from rlhf_rollouts.tools.template import ToolTemplate, Turn


def read(self: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Turn:
    text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if sum(tokens) % 2:
        function = {"name": "add", "arguments": {"a": len(tokens), "b": sum(tokens) % 10}}
        message["tool_calls"] = [{"type": "function", "function": function}]
    return Turn(message)


def run(
    trainer: str, words: Sequence[str], cache: str, plain: bool = False, **options: Any
) -> Metrics:
    with patch.object(ToolTemplate, "read", read):
        return tiny.run(trainer, words, cache, plain, **options)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|>{{ message.content }}"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
