"""How policies write calls of tools, as response templates of transformers."""

import re
from collections.abc import Sequence
from typing import Any

XML = {
    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
    "value_parser": {"name": "text"},
}
CALL = {"name": "{name}", "arguments": "{content}"}


def response_templates(header: str, ends: Sequence[str]) -> list[dict[str, Any]]:
    """Return the response templates of known formats, for a chat template that begins an answer
    with `header`, of which one of `ends` is the end: that of Hermes, Qwen 2.5 and Qwen 3 with JSON
    in <tool_call>, that of Qwen 3.5 with tags, and that of Llama 3.1, which is only JSON. The
    patterns are those of TRL."""
    end = "(?:" + "|".join(map(re.escape, ends)) + r")\s*"
    thinking = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    hermes = {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    tags = {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</tool_call>\s*",
        "content": "xml-inline",
        "content_args": XML,
        "transform": {"type": "function", "function": CALL},
    }
    bare = {
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}" + end,
        "content": "json",
        "transform": {"type": "function", "function": CALL},
    }
    return [
        {
            "defaults": {"role": "assistant"},
            "start_anchor": header,
            "fields": {
                "reasoning_content": thinking,
                "tool_calls": {**calls, "repeats": True},
                "content": {"close_pattern": end, "content": "text"},
            },
        }
        for calls in (hermes, tags, bare)
    ]
