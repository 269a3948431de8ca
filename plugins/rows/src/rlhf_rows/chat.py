"""Conversations as text, with the assistant's turns located to the character.

A turn is rendered as the model would meet it: the conversation up to it, ending with it. What the
template writes before the turn is the prompt, and so is an empty block of reasoning that it adds to
an answer without reasoning; the turn with its end-of-turn token is trained on.
Turns whose rendering is a prefix of the last one's share one text. If a template renders earlier
turns differently later (reasoning is dropped, tools move to the last question), the conversation
is split, so that each turn is trained on in the context in which it is generated.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.errors import RLHFError
from rlhf.formats import PROBES, in_parts, special_tokens, turn_ending
from rlhf_rows.columns import shown
from rlhf_rows.content import REASONING, readable, without_refused_system
from rlhf_rows.encoder import Rendered, common_prefix
from rlhf_rows.messages import TRAIN_KEYS, Message, Messages, images_in, text_of
from rlhf_rows.repeatable import check_no_object, without_draws

MARKS = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
EMPTY_REASONING = re.compile(r"\s*(?:<(\w+)>\s*</\1>|\[(\w+)\]\s*\[/\2\])\s*")
"""What templates write before an answer without reasoning, such as `<think></think>`: it is part of
the prompt when the model is asked to answer without reasoning."""

Spans = tuple[tuple[int, int], ...]


class ChatTemplate:
    """Renders conversations and finds the assistant's turns in them."""

    def __init__(self, tokenizer: Any, *, whole: bool = False, name: str = "") -> None:
        """With `whole`, a text continues to the end of the rendering, past its last turn. Error
        messages call the template by its `name`, the tokenizer's by default."""
        self.tokenizer = tokenizer
        self._name = name
        self._whole = whole
        self._special = special_tokens(tokenizer)

    def render(
        self,
        messages: Messages,
        *,
        first: int,
        tools: Sequence[Any] | None,
        keywords: Mapping[str, Any],
    ) -> list[Rendered]:
        """Return the texts to train on; their spans are the assistant's turns from message `first`,
        without those that the row excludes.

        One text, or several if the template renders earlier turns differently; none without such a
        turn. Raises RLHFError if the template refuses the conversation or a turn cannot be located.
        """
        turns = [
            number
            for number, message in enumerate(messages)
            if number >= first and _is_trained(number, message)
        ]
        view = self.view(tools, keywords)
        if not turns:
            return []
        kept = without_refused_system(messages, view.text_or_none)
        turns = [number - (len(messages) - len(kept)) for number in turns]
        messages = readable(kept[: turns[-1] + 1], view.text_or_none)
        contexts = [messages[: number + 1] for number in turns]
        rendered = [self._turn(context, view) for context in contexts]
        out: list[Rendered] = []
        for context, (text, spans) in zip(reversed(contexts), reversed(rendered), strict=True):
            if out and out[-1].text.startswith(text):
                out[-1] = attrs.evolve(out[-1], spans=spans + out[-1].spans)
            else:
                out.append(Rendered(text, spans, images=images_in(context)))
        # The first here is the text of the last turn.
        _raise_if_dropped(view, contexts[-1], out[0].text)
        if self._whole:
            out[0] = attrs.evolve(out[0], text=view.text(contexts[-1]))
        bare = self.view(None, keywords) if view.tools else None
        if bare and all(bare.text_or_none(it) == view.text_or_none(it) for it in contexts):
            raise RLHFError(
                "the chat template ignores `tools`; remove them or set data.chat_template"
            )
        return out[::-1]

    def prompt(
        self, messages: Messages, *, tools: Sequence[Any] | None, keywords: Mapping[str, Any]
    ) -> str:
        """Return the text of a conversation that the next answer continues."""
        view = self.view(tools, keywords)
        messages = without_refused_system(messages, view.text_or_none)
        return view.text(readable(messages, view.text_or_none), opened=True)

    def view(
        self, tools: Sequence[Any] | None = None, keywords: Mapping[str, Any] | None = None
    ) -> "Rendering":
        """Return the template with these tools and keywords. Raises RLHFError if there is none."""
        if not self.tokenizer.chat_template:
            raise RLHFError(
                "this is a conversation, but the tokenizer has no chat template; "
                "set data.chat_template to a file or to chatml"
            )
        if not tools and not keywords:
            return self._plain
        return Rendering(self.tokenizer, tools, keywords or {}, self._name, self._plain.in_parts)

    @cached_property
    def _plain(self) -> "Rendering":
        plain = Rendering(self.tokenizer, None, {}, self._name)
        plain.in_parts = _drops_text(plain)
        return plain

    def _turn(self, messages: Messages, view: "Rendering") -> tuple[str, Spans]:
        """Return the rendering up to the end of the last turn, and the spans of that turn."""
        if view.marked:
            return self._marked_turn(messages, view)
        text = view.text(messages)
        prompt = view.prompt(messages[:-1])
        start: int | None
        if prompt is not None and text.startswith(prompt):
            start = _after_empty_reasoning(text, len(prompt), messages[-1])
        else:
            start = self._start_by_probes(text, messages, view)
        if start is None:
            raise RLHFError(
                "cannot locate the assistant's turn in the rendered conversation; put "
                "{% generation %} marks around it in a template file and name the file in "
                "data.chat_template"
            )
        end = self._end(text, start)
        return text[:end], ((start, end),) if end > start else ()

    def _marked_turn(self, messages: Messages, view: "Rendering") -> tuple[str, Spans]:
        """Return the same for a template with `{% generation %}` marks."""
        text, spans = view.marks(messages)
        if any(message["role"] == "assistant" for message in messages[:-1]):
            spans = spans[len(view.marks(messages[:-1])[1]) :]
        if not spans:
            return text, ()
        start, end = spans[-1]
        if not self._ends_with_special(text[start:end]):
            # A special token may follow the turn, after blanks.
            match = self._special.match(text, len(text) - len(text[end:].lstrip()))
            end = match.end() if match else end
        return text[:end], (*spans[:-1], (start, end))

    def _start_by_probes(self, text: str, messages: Messages, view: "Rendering") -> int | None:
        """Return where renderings with other answers begin to differ, after the earlier messages.

        Needed if the generation prompt says more than the rendering.
        """
        before = messages[:-1]
        closed = view.text_or_none(before) if before else ""
        others = [view.text_or_none([*before, _answer(probe)]) for probe in PROBES]
        known = [other for other in others if other is not None]
        if closed is None or len(known) < len(PROBES) or not text.startswith(closed):
            return None
        return max(len(closed), len(common_prefix([text, *known])))

    def _end(self, text: str, start: int) -> int:
        """Return where the turn ends: with its end-of-turn token, if the text ends as it does after
        any answer; else with the last special token, if only blanks follow it."""
        if self._ending and text.endswith(self._ending[0]):
            tail, token = self._ending
            answer_end = len(text) - len(tail)
            if answer_end >= start:
                return answer_end + token.end()
        stripped = text.rstrip()
        return len(stripped) if self._ends_with_special(stripped[start:]) else len(text)

    @cached_property
    def _ending(self) -> tuple[str, re.Match[str]] | None:
        return turn_ending(self._plain.text_or_none, self._special)

    def _ends_with_special(self, text: str) -> bool:
        return any(match.end() == len(text) for match in self._special.finditer(text))


class Rendering:
    """A chat template with the tools and the keywords of a conversation."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Any] | None,
        keywords: Mapping[str, Any],
        name: str,
        in_parts: bool = False,
    ) -> None:
        self.in_parts = in_parts
        """Whether content that is text is rendered as a list of one part."""
        self._name = name or f"of {tokenizer.name_or_path or 'the tokenizer'}"
        self.template: str = tokenizer.get_chat_template(tools=tools)
        self.marked = MARKS.search(self.template) is not None
        self.tools = list(tools) if tools else None
        self._keywords = {**tokenizer.special_tokens_map, **keywords}
        self._last: tuple[Messages, str | None] | None = None

    def text(self, messages: Messages, *, opened: bool = False) -> str:
        """Return the conversation as text; with `opened`, followed by the next answer's header."""
        return self._render(messages, opened=opened)[0]

    def text_or_none(self, messages: Messages, *, opened: bool = False) -> str | None:
        """Return the same, or None if the template refuses."""
        try:
            return self.text(messages, opened=opened)
        except RLHFError:
            return None

    def prompt(self, messages: Messages) -> str | None:
        """Return the text that the model continues, None if the template refuses.

        The last one is kept, since answers to one prompt follow one another.
        """
        if self._last is None or [*map(id, self._last[0])] != [*map(id, messages)]:
            self._last = messages, self.text_or_none(messages, opened=True)
        return self._last[1]

    def marks(self, messages: Messages) -> tuple[str, Spans]:
        """Return the text and the spans of its `{% generation %}` marks."""
        text, spans = self._render(messages, marks=True)
        return text, tuple((start, end) for start, end in spans if end > start)

    def _render(
        self, messages: Messages, *, opened: bool = False, marks: bool = False
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        try:
            with without_draws(self.template, self._name):
                texts, spans = render_jinja_template(
                    conversations=[list(map(in_parts, messages) if self.in_parts else messages)],
                    tools=self.tools,
                    chat_template=self.template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=opened,
                    **self._keywords,
                )
        except ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RLHFError(
                f"the chat template refuses the conversation ({reason}); change the row or set "
                "data.chat_template"
            ) from None
        check_no_object(texts[0], self._name, messages, self.tools, self._keywords)
        return texts[0], spans[0] if marks else ()


# A template is a program of its author over rows of the user: it may fail in any of these ways.
ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


def _drops_text(view: Rendering) -> bool:
    """Return whether the template drops content that is text, and renders parts, as those of some
    models of images do."""
    question = {"role": "user", "content": PROBES[0]}
    texts = [view.text_or_none([message]) or "" for message in (question, in_parts(question))]
    return [PROBES[0] in text for text in texts] == [False, True]


def _raise_if_dropped(view: Rendering, messages: Messages, text: str) -> None:
    """Raise RLHFError for content or tool calls on which the rendered `text` does not depend."""
    for number, message in enumerate(messages):
        for what, other in _others(message, text):
            changed = [*messages[:number], {**message, **other}, *messages[number + 1 :]]
            if view.text_or_none(changed) == view.text(messages):
                raise RLHFError(
                    f"the chat template drops {what} of message {number} (role "
                    f"{message['role']}); change the row or set data.chat_template"
                )


def _others(message: Message, text: str) -> Iterator[tuple[str, Message]]:
    """Yield what the rendered `text` may lack of a message, with another value of it."""
    content = message.get("content")
    if isinstance(content, str) and content.strip() not in text:
        yield "`content`", {"content": PROBES[0]}
    parts = content if isinstance(content, list) else []
    for number, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") in REASONING:
            continue  # Templates render it in the last turn only.
        words = text_of(part)
        if words is None or words.strip() not in text:
            others = [*parts[:number], *parts[number + 1 :]]
            yield f"part {number} of `content`", {"content": others}
    if message.get("tool_calls"):
        yield "`tool_calls`", {"tool_calls": []}


def _after_empty_reasoning(text: str, start: int, message: Message) -> int:
    """Return where the answer begins: after empty reasoning that the row does not have."""
    block = EMPTY_REASONING.match(text, start)
    if block is None or block.group().strip() in str(message.get("content")):
        return start
    return block.end()


def _is_trained(number: int, message: Message) -> bool:
    """Return whether a message is a turn of the assistant that its row does not exclude."""
    chosen = {name: message[name] for name in TRAIN_KEYS if message.get(name) is not None}
    of = f"of message {number} (role {message['role']})"
    for name, value in chosen.items():
        if value not in (0, 1):
            raise RLHFError(f"`{name}` {of} is {shown(value)}; use 0 or 1, false or true")
        if value and message["role"] != "assistant":
            raise RLHFError(
                f"`{name}` {of} is {shown(value)}, but only turns of the assistant are trained on; "
                "remove it"
            )
    return message["role"] == "assistant" and all(chosen.values())


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
