"""Where the assistant's turns stand in a rendered conversation, to the character.

A turn is rendered as the model would meet it: the conversation up to it, ending with it. What the
template writes before the turn is the prompt, the turn with its end-of-turn token is trained on.
Turns whose rendering is a prefix of the last one's share one text; where a template renders history
otherwise than it rendered the turn (reasoning dropped from earlier turns, tools moved to the last
question) the conversation is split, so that each turn is trained on in the very context it is
generated in.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.data.encode import Marked
from rlhf.errors import RLHFError

Message = Mapping[str, Any]
Messages = Sequence[Message]
MARKS = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
PROBES = ("kilo", "zulu")
"""Two answers that share neither their first nor their last letter."""


class ChatTemplate:
    """Renders conversations and finds the assistant's turns in them."""

    def __init__(self, tokenizer: Any, *, whole: bool = False) -> None:
        """With `whole` a text goes on to the end of the rendering, behind its last turn."""
        self.tokenizer = tokenizer
        self._whole = whole
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        names = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._tails: dict[str, tuple[str, int] | None] = {}
        self._plain: Rendering | None = None

    @property
    def present(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def documents(
        self,
        messages: Messages,
        *,
        first: int = 0,
        tools: Sequence[Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> list[Marked]:
        """The texts to train on, with the assistant's turns from message number `first` on as
        spans.

        One text, or several where the template renders history otherwise. Empty if there is no such
        turn. Raises RLHFError if the template refuses the conversation or a turn cannot be told
        from the rest.
        """
        turns = [
            number
            for number, message in enumerate(messages)
            if number >= first and message["role"] == "assistant"
        ]
        view = self.view(tools, keywords)
        found = [self._turn(messages[: number + 1], view) for number in turns]
        out: list[Marked] = []
        for text, spans in reversed(found):
            if out and out[-1].text.startswith(text):
                out[-1] = Marked(out[-1].text, spans + out[-1].spans)
            else:
                out.append(Marked(text, spans))
        if self._whole and out:
            # The last turn's text is the first here.
            out[0] = Marked(view.text(messages[: turns[-1] + 1]), out[0].spans)
        return out[::-1]

    def view(
        self, tools: Sequence[Any] | None = None, keywords: Mapping[str, Any] | None = None
    ) -> "Rendering":
        """The template with these tools and keywords."""
        if tools or keywords:
            return Rendering(self, tools, keywords or {})
        if self._plain is None:
            self._plain = Rendering(self, None, {})
        return self._plain

    def _turn(
        self, messages: Messages, view: "Rendering"
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The rendering up to the end of the last turn, and the spans of that turn."""
        if view.marked:
            return self._marked_turn(messages, view)
        text = view.text(messages)
        start = self._start(text, messages, view)
        end = self._end(text, start, view)
        return text[:end], ((start, end),) if end > start else ()

    def _marked_turn(
        self, messages: Messages, view: "Rendering"
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        text, spans = view.marks(messages)
        earlier = any(message["role"] == "assistant" for message in messages[:-1])
        if earlier:
            spans = spans[len(view.marks(messages[:-1])[1]) :]
        if not spans:
            return text, ()
        start, end = spans[-1]
        if not self._closes(text[start:end]):
            end += self._closing(text[end:])
        return text[:end], (*spans[:-1], (start, end))

    def _closes(self, text: str) -> bool:
        """Whether the text ends with a special token."""
        return any(match.end() == len(text) for match in self._special.finditer(text))

    def _closing(self, tail: str) -> int:
        """How many characters of the tail lead to the end of its first token, if that is a special
        one."""
        blank = len(tail) - len(tail.lstrip())
        match = self._special.match(tail, blank)
        return match.end() if match else 0

    def _start(self, text: str, messages: Messages, view: "Rendering") -> int:
        """Where the last turn begins: after the generation prompt, if the rendering goes on from
        it."""
        before = messages[:-1]
        prompt = view.prompt(before)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        # The generation prompt says more than the rendering: the turn begins where the answer makes
        # a difference.
        closed = view.text_or_none(before) if before else ""
        others = [view.text_or_none([*before, _answer(probe)]) for probe in PROBES]
        known = [other for other in others if other is not None]
        header = len(_shared([text, *known]))
        if closed is None or len(known) < len(PROBES) or not text.startswith(closed):
            raise RLHFError(
                "the chat template renders the conversation in a way in which the "
                "assistant's turn cannot be told "
                "from the rest: put {% generation %} marks around it in a file and name that "
                "in data.chat_template"
            )
        return max(len(closed), header)

    def _end(self, text: str, start: int, view: "Rendering") -> int:
        """Where the last turn ends: after its end-of-turn token, before the template's own line
        break."""
        tail = self._tail(view)
        if tail is not None and text.endswith(tail[0]) and len(text) - len(tail[0]) >= start:
            return len(text) - len(tail[0]) + tail[1]
        stripped = text.rstrip()
        return len(stripped) if self._closes(stripped[start:]) else len(text)

    def _tail(self, view: "Rendering") -> tuple[str, int] | None:
        """What the template writes after an answer, and how much of it the model generates."""
        if view.template not in self._tails:
            plain = self.view()
            texts = [
                plain.text_or_none([{"role": "user", "content": "a"}, _answer(probe)])
                for probe in PROBES
            ]
            found = None
            if texts[0] is not None and texts[1] is not None:
                tail = _shared([text[::-1] for text in texts if text])[::-1]
                match = self._special.search(tail)
                found = (tail, match.end()) if match else None
            self._tails[view.template] = found
        return self._tails[view.template]


class Rendering:
    """One conversation's template with its tools and keywords."""

    def __init__(
        self, chat: ChatTemplate, tools: Sequence[Any] | None, keywords: Mapping[str, Any]
    ) -> None:
        self.template: str = chat.tokenizer.get_chat_template(tools=tools)
        self.marked = MARKS.search(self.template) is not None
        self._tools = list(tools) if tools else None
        self._keywords = {**chat.tokenizer.special_tokens_map, **keywords}
        self._last: tuple[Messages, str | None] | None = None

    def text(self, messages: Messages, *, opened: bool = False) -> str:
        """The conversation as text; with `opened` the header of the next answer after it."""
        try:
            return self._render(messages, opened=opened, marks=False)[0]
        except ERRORS as error:
            raise _refused(error) from None

    def text_or_none(self, messages: Messages, *, opened: bool = False) -> str | None:
        """The same, or None if the template refuses."""
        try:
            return self._render(messages, opened=opened, marks=False)[0]
        except ERRORS:
            return None

    def prompt(self, messages: Messages) -> str | None:
        """The text that the model goes on from, None if the template refuses. The last one is kept,
        since answers to one prompt follow one another."""
        if self._last is not None and _same(self._last[0], messages):
            return self._last[1]
        text = self.text_or_none(messages, opened=True)
        self._last = (messages, text)
        return text

    def marks(self, messages: Messages) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text and what stands in `{% generation %}` marks."""
        try:
            text, spans = self._render(messages, opened=False, marks=True)
        except ERRORS as error:
            raise _refused(error) from None
        return text, tuple((start, end) for start, end in spans if end > start)

    def _render(
        self, messages: Messages, *, opened: bool, marks: bool
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=self._tools,
            chat_template=self.template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=opened,
            **self._keywords,
        )
        return texts[0], spans[0] if marks else ()


# A template is somebody's program over somebody's rows: it may fail in any of these ways.
ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


def _same(one: Messages, other: Messages) -> bool:
    """Whether these are the very same messages."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _shared(texts: Sequence[str]) -> str:
    """What all the texts begin with."""
    low, high = min(texts), max(texts)
    for place, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return low[:place]
    return low[: len(high)]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _refused(error: Exception) -> RLHFError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return RLHFError(
        f"the chat template refuses the conversation ({reason}): change the row or set "
        "data.chat_template"
    )
