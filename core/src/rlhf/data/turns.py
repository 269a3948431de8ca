"""How a chat template ends the turns of the assistant."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

PROBES = ("kilo", "zulu")
"""Two answers that share neither their first nor their last letter."""


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of the tokenizer's added tokens, the longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    names = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def turn_ending(
    render: Callable[[Sequence[Mapping[str, Any]]], str | None], special: re.Pattern[str]
) -> tuple[str, re.Match[str]] | None:
    """Return what a template writes after any answer, and the `special` token in it with which the
    answer ends; None without one. `render` returns a conversation as text, None if the template
    refuses it: some need a system message."""
    question = {"role": "user", "content": "a"}
    for before in ([question], [{"role": "system", "content": "a"}, question]):
        answers = [{"role": "assistant", "content": probe} for probe in PROBES]
        texts = [render([*before, answer]) for answer in answers]
        if None not in texts:
            pairs = zip(*(text[::-1] for text in texts if text), strict=False)
            same = takewhile(lambda pair: len({*pair}) == 1, pairs)
            tail = "".join(last for last, _ in same)[::-1]
            match = special.search(tail)
            return (tail, match) if match else None
    return None


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is a list of parts, as templates of some models of images need
    it."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
