"""A chat template with tools: the calls in a turn of the policy, and what the template writes
between that turn and the next one. What the policy wrote is never tokenised again."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from rlhf.errors import RLHFError, first_line
from rlhf_rollouts.tools.formats import response_templates

Message = dict[str, Any]
WORD, RESULT = "kilo", "zulu"
PROBE: dict[str, Any] = {"name": "probe_tool", "arguments": {"key": WORD}}
PROPERTIES = {"key": {"type": "string", "description": "A word."}}
PROBE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE["name"],
        "description": "A tool.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["key"]},
    },
}
REMEDY = "set data.chat_template to one that does, such as that of the model's authors"
LEVELS = 100
"""How deep the arguments of a call may be nested; processes cannot be sent much deeper ones."""


@frozen
class Turn:
    """A turn of the policy as a message."""

    message: Message
    """With `tool_calls` if there are any."""
    malformed: bool = False
    """Whether it could not be read, so that it is text without calls."""

    @property
    def calls(self) -> list[Message]:
        """The functions that are called, each with `name` and `arguments`."""
        return [call["function"] for call in self.message.get("tool_calls") or ()]


class ToolTemplate:
    """The chat template of a tokenizer, which must render calls and their results. Raises RLHFError
    for one that does not, or whose calls cannot be read."""

    def __init__(self, tokenizer: Any, schemas: Sequence[Message]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        if not tokenizer.chat_template:
            raise RLHFError(
                "the tokenizer has no chat template, which says how tools are called; set "
                "data.chat_template"
            )
        known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        self._special = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids([*known])}
        asked, answer = _probe()
        ids = self._ids([*asked, answer])
        ends = [number for number, token in enumerate(ids) if token in self._special]
        self._end = ids[ends[-1]] if ends else tokenizer.eos_token_id
        self.ends = frozenset({self._end, tokenizer.eos_token_id} - {None})
        """Tokens after which a turn has ended."""
        result = {"role": "tool", "name": PROBE["name"], "content": RESULT}
        suffix = tokenizer.decode(self.suffix([result], {}, ended=True))
        if RESULT not in suffix or WORD in suffix:
            raise RLHFError(f"the chat template does not render what a tool returns; {REMEDY}")
        self._format = self._find_format()

    def read(self, prompt: Sequence[int], tokens: Sequence[int]) -> Turn:
        """Return a turn of the policy after all token ids before it."""
        try:
            message = self._parsed(list(tokens), list(prompt), self._format, self._schemas)
            return Turn(message)
        except Exception:  # The policy may write anything, and parsers raise several kinds.
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
            return Turn({"role": "assistant", "content": text}, malformed=True)

    def suffix(
        self, results: Sequence[Message], keywords: Mapping[str, Any], *, ended: bool
    ) -> list[int]:
        """Return the token ids between a turn and the next one: the end of the turn unless it has
        `ended`, the results of its calls, and the header of the next turn. `keywords` are those of
        the chat template. Raises RLHFError for a template without a token that ends a turn."""
        asked, answer = _probe(str(results[0]["name"]))
        before = self._ids([*asked, answer], **keywords)
        after = self._ids([*asked, answer, *results], add_generation_prompt=True, **keywords)
        # A template may render the call otherwise when its result follows (Qwen 3 leaves out an
        # empty block of reasoning), so the turn is found by its end.
        turns = before.count(self._end)
        ends = [number for number, token in enumerate(after) if token == self._end]
        if not turns or len(ends) < turns:
            raise RLHFError(f"the chat template has no token after a call that ends it; {REMEDY}")
        return after[ends[turns - 1] + ended :]

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return a conversation as token ids."""
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # Templates raise several kinds.
            raise RLHFError(
                f"the chat template does not render calls of tools ({first_line(error)}); {REMEDY}"
            ) from error
        return ids

    def _find_format(self) -> dict[str, Any]:
        """Return the response template with which the call that the chat template writes is read:
        that of the tokenizer, or a known one."""
        asked, answer = _probe()
        prompt = self._ids(asked, add_generation_prompt=True, tools=[PROBE_SCHEMA])
        if PROBE["name"] not in self._tokenizer.decode(prompt):
            raise RLHFError(f"the chat template does not render the available tools; {REMEDY}")
        before = self._ids(asked, tools=[PROBE_SCHEMA])
        whole = self._ids([*asked, answer], tools=[PROBE_SCHEMA])
        header = self._tokenizer.decode(prompt[len(before) :]).partition("<think>")[0]
        start = len(before) + len(self._tokenizer.encode(header, add_special_tokens=False))
        place = len(whole) - whole[::-1].index(self._end) if self._end in whole else len(whole)
        own = getattr(self._tokenizer, "response_template", None)
        ends = [self._tokenizer.decode([end]) for end in sorted(self.ends)]
        known = [] if not header else response_templates(header, ends)
        for form in [own, *known] if own else known:
            try:
                found = self._parsed(whole[start:place], whole[:start], form, [PROBE_SCHEMA])
            except Exception:  # It is another format.
                continue
            if [call["function"] for call in found.get("tool_calls") or ()] == [PROBE]:
                return dict(form)
        raise RLHFError(
            "the calls that the chat template writes cannot be read; put a response_template into "
            "tokenizer_config.json, as transformers' page on response parsing describes"
        )

    def _parsed(
        self, tokens: list[int], prompt: list[int], form: Any, schemas: Sequence[Message]
    ) -> Message:
        """Return a turn as a message. Raises an error for one that cannot be read."""
        message: Message = self._tokenizer.parse_response(
            tokens, form, prefix=prompt, tools=list(schemas)
        )
        content = message.get("content")
        if isinstance(content, str) and self._tokenizer.eos_token:
            content = content.removesuffix(self._tokenizer.eos_token)
        message["content"] = content or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if not isinstance(function["name"], str):
                raise TypeError("the name of a tool is not text")
            if function.get("arguments") is None:
                function["arguments"] = {}
        check_plain(message)
        return message


def check_plain(value: Any, levels: int = LEVELS) -> None:
    """Raise ValueError for text with half a surrogate pair, which JSON may hold but no tokenizer
    takes, and for lists and objects nested deeper than `levels`."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError("nested too deeply")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            check_plain(each, levels - 1)


def _probe(name: str = str(PROBE["name"])) -> tuple[list[Message], Message]:
    """Return a question, and an answer that calls a tool."""
    call = {"type": "function", "function": {**PROBE, "name": name}}
    asked = [{"role": "user", "content": "a"}]
    return asked, {"role": "assistant", "content": "", "tool_calls": [call]}
