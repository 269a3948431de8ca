"""Prompts that a row has twice: in its prompt and at the beginning of its answers."""

from collections.abc import Sequence
from typing import Any

from rlhf.errors import RLHFError
from rlhf_rows.messages import SYSTEM, Messages, same_message

Talk = list[Any]
"""A list of messages."""


def split_prompt(
    prompt: Messages, answers: Sequence[Messages], names: Sequence[str]
) -> tuple[Talk, list[Talk]]:
    """Return the messages before all answers, and those of each answer without what it repeats.

    An answer may repeat the prompt or its last messages, or hold a longer conversation with the
    prompt in it. The system message may be in any of them. `names` are what errors call the
    answers. Raises RLHFError if system messages differ, or if an answer begins with another turn of
    the user than the prompt ends with.
    """
    split = [_without_system(talk) for talk in (prompt, *answers)]
    system = _common_system([first for first, _ in split], ("prompt", *names))
    asked, *talks = (rest for _, rest in split)
    longer = [_place(asked, talk) for talk in talks]
    if asked and all(place is not None for place in longer):
        ends = [(place or 0) + len(asked) for place in longer]
        before = talks[0][: ends[0]]
        if all(_same(talk[:end], before) for talk, end in zip(talks, ends, strict=True)):
            return system + before, [t[end:] for t, end in zip(talks, ends, strict=True)]
        return system, talks
    pairs = zip(talks, names, strict=True)
    return system + asked, [_without_repeat(asked, talk, name) for talk, name in pairs]


def shared_size(one: Messages, other: Messages) -> int:
    """Return with how many messages both conversations begin, before the last of any."""
    pairs = enumerate(zip(one, other, strict=False))
    shortest = min(len(one), len(other))
    size = next((n for n, (a, b) in pairs if not same_message(a, b)), shortest)
    # Two last messages that say the same are answers all the same.
    return size - 1 if size and size == len(one) == len(other) else size


def repeated_text(prompt: str, answers: Sequence[str]) -> list[str] | None:
    """Return the answers without the prompt, if all of them begin with it; None if not.

    A prompt of one word is not looked for: answers may begin with the same word.
    """
    text = prompt.strip()
    if len(text.split()) < 2 or not all(answer.lstrip().startswith(text) for answer in answers):
        return None
    rests = [answer[answer.index(text) + len(text) :] for answer in answers]
    blanks = prompt[len(prompt.rstrip()) :]
    return [rest.removeprefix(blanks) for rest in rests] if any(rests) else None


def _without_system(messages: Messages) -> tuple[Any, Talk]:
    """Return the system message at the start, if there is one, and the other messages."""
    if messages and messages[0]["role"] in SYSTEM:
        return messages[0], [*messages[1:]]
    return None, [*messages]


def _common_system(found: Sequence[Any], names: Sequence[str]) -> Talk:
    """Return a list of the only system message, which is empty if there is none."""
    named = [(name, message) for name, message in zip(names, found, strict=True) if message]
    for name, message in named[1:]:
        if not same_message(named[0][1], message):
            raise RLHFError(
                f"the system messages of `{named[0][0]}` and `{name}` differ; use the same one"
            )
    return [message for _, message in named[:1]]


def _place(part: Messages, whole: Messages) -> int | None:
    """Return where a conversation holds all messages of another one, None if it does not."""
    places = range(len(whole) - len(part) + 1)
    return next((n for n in places if _same(whole[n : n + len(part)], part)), None)


def _without_repeat(prompt: Talk, answer: Talk, name: str) -> Talk:
    """Return the messages of an answer after those with which the prompt ends."""
    for size in range(min(len(prompt), len(answer)), 0, -1):
        if prompt[-size]["role"] == "user" and _same(prompt[-size:], answer[:size]):
            return answer[size:]
    answers = any(message["role"] == "assistant" for message in answer)
    if prompt and answers and prompt[-1]["role"] == answer[0]["role"] == "user":
        raise RLHFError(
            f"`prompt` ends with a turn of the user and `{name}` begins with another one; remove "
            "one of them, or rename `prompt` with `columns` in data"
        )
    return answer


def _same(one: Messages, other: Messages) -> bool:
    return len(one) == len(other) and all(map(same_message, one, other))
