"""Texts and conversations to token ids: what the row formats and `encode` share."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attrs import Factory, define

from rlhf.errors import RLHFError
from rlhf.formats import Answer, Columns, Row, errors_at, missing_columns
from rlhf.plugin import documented
from rlhf_rows.chat import ChatTemplate
from rlhf_rows.columns import keywords_of, shown, tools_of, type_name
from rlhf_rows.encoder import Encoded, Encoder, Rendered, Unencoded, common_prefix
from rlhf_rows.images import open_images
from rlhf_rows.messages import KNOWN_ROLES, Messages, as_messages
from rlhf_rows.prompts import repeated_text, split_prompt


@documented
@define(eq=False)
class Reader:
    """What a row format reads rows with: the tokenizer, its chat template and the settings of the
    trainer."""

    tokenizer: Any
    """The tokenizer of transformers."""
    whole: bool = False
    """Whether texts are tokenised as one, and conversations keep what the template writes after
    their last turn."""
    section: Any = None
    """The trainer's own section, whose settings may say how rows are read."""
    template: str = ""
    """What error messages call the chat template; empty for that of the tokenizer."""
    images: Any = None
    """Opens the images of rows, by `open(columns)`; core sets it."""
    encoder: Encoder = Factory(lambda it: Encoder(it.tokenizer, as_one=it.whole), takes_self=True)
    """Tokenises the texts."""
    chat: ChatTemplate = Factory(
        lambda it: ChatTemplate(it.tokenizer, whole=it.whole, name=it.template), takes_self=True
    )
    """Renders conversations."""


def encode(
    tokenizer: Any,
    prompt: str | Messages,
    *answers: str | Messages,
    tools: Sequence[Any] | None = None,
    renders_whole: bool = False,
    images: Any = None,
) -> Row:
    """Return a prompt and its answers as token ids, encoded as the row formats encode them.

    For `example` of a trainer without a row format. `prompt` and each of `answers` is text or a
    list of messages. If all are text, the prompt gets BOS if the tokenizer adds one, and each
    answer ends with EOS. Otherwise each path is a conversation, rendered by the chat template with
    `tools` (JSON schemas), and the assistant's turns of the answer are trained on.
    `renders_whole` is described at `Trainer.renders_whole`. Core applies `data.max_tokens` later,
    to the example. Messages may have images only with `images`, `rlhf.scorer.Scorer.images`. Raises
    RLHFError for values of another shape; core adds the row's place.
    """
    if not answers:
        raise RLHFError("a row needs at least one answer")
    reader = reader_of(tokenizer, whole=renders_whole)
    row: Columns = {"prompt": prompt, "tools": None if tools is None else list(tools)}
    opened = open_images(images, {**row, "answers": list(answers)})
    if opened:
        row, answers = opened.row, opened.row["answers"]
    names = [f"answers[{number}]" for number in range(len(answers))]
    rendered = render_answers(row, reader, names, answers)
    unencoded: Unencoded = (rendered, functools.partial(join_paths, {}))
    texts, make = opened.expand(unencoded) if opened else unencoded
    return make(reader.encoder.encode(texts))


def reader_of(tokenizer: Any, **options: Any) -> Reader:
    """Return a reader of the tokenizer with its present chat template, made once."""
    return _reader(tokenizer, str(tokenizer.chat_template), **options)


@functools.lru_cache(maxsize=8)
def _reader(tokenizer: Any, template: str, **options: Any) -> Reader:
    return Reader(tokenizer, **options)


def read_row(
    read: Callable[[Columns, Reader], list[Unencoded]],
    row: Columns,
    tokenizer: Any,
    *,
    section: Any = None,
    where: str = "the row",
) -> list[Row]:
    """Return what one row becomes in the format that `read` implements, with a trainer's hashable
    `section`: for rows that are in no file. Errors call the row `where`."""
    reader = reader_of(tokenizer, section=section)
    with errors_at(where):
        unencoded = read(row, reader)
    (rows,) = encode_all([(where, unencoded)], reader)
    return rows


def encode_all(rows: Sequence[tuple[str, Sequence[Unencoded]]], reader: Reader) -> list[list[Row]]:
    """Tokenise all rows at once; errors name the place of the row."""
    paths = [path for _, parts in rows for rendered, _ in parts for path in rendered]
    encoded = iter(reader.encoder.encode(paths))
    out = []
    for where, parts in rows:
        with errors_at(where):
            out.append([make(list(itertools.islice(encoded, len(texts)))) for texts, make in parts])
    return out


def join_paths(columns: Columns, paths: Sequence[Encoded]) -> Row:
    """Return the tree of paths that begin alike.

    Its prompt is what all paths share before the first trained token of any.
    """
    prompt = common_prefix([path.ids[: _prompt_size(path)] for path in paths])
    return Row(prompt, [_answer(path, len(prompt)) for path in paths], columns)


def render_text(prompt: str, answer: str) -> Rendered:
    """Return plain text of which the answer is trained on."""
    for value in (prompt, answer):
        if not isinstance(value, str):
            raise RLHFError(f"a prompt and its answer must be text, not {type_name(value)}")
    whole = prompt + answer
    return Rendered(whole, ((len(prompt), len(whole)),), bos=True, eos=True)


def render_prompt(row: Columns, reader: Reader) -> str:
    """Return the row's `prompt` as text: messages end with the header of an answer, and a row may
    have no prompt."""
    prompt = row.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    messages = as_messages("prompt", prompt)
    return reader.chat.prompt(messages, tools=tools_of(row), keywords=keywords_of(row))


def render_conversation(
    row: Columns, reader: Reader, messages: Messages, *, first: int
) -> list[Rendered]:
    """Return the conversation as text; the assistant's turns from message `first` are trained on.

    Several texts if the template renders earlier turns differently, none without such a turn.
    """
    return reader.chat.render(messages, first=first, tools=tools_of(row), keywords=keywords_of(row))


def render_answers(
    row: Columns, reader: Reader, names: Sequence[str], values: Sequence[Any]
) -> list[Rendered]:
    """Return the path of the row's prompt with each of `values`: text or message lists.

    `names` are what error messages call the values.
    """
    if row.get("prompt") is None:
        raise missing_columns(row, "`prompt`")
    prompt = row["prompt"]
    if isinstance(prompt, str) and all(isinstance(value, str) for value in values):
        if len(values) > 1:  # One answer may well begin with its prompt, several hardly do.
            values = repeated_text(prompt, values) or values
        return [render_text(prompt, value) for value in values]
    pairs = zip(names, values, strict=True)
    talks = [as_messages(name, value, role="assistant") for name, value in pairs]
    before, answers = split_prompt(as_messages("prompt", prompt, role="user"), talks, names)
    return [
        render_answer(row, reader, before, answer, name)
        for name, answer in zip(names, answers, strict=True)
    ]


def render_answer(
    row: Columns, reader: Reader, before: Messages, answer: Messages, name: str
) -> Rendered:
    """Return an answer after its prompt.

    If the template renders earlier turns of the answer differently, only its last turn is trained
    on.
    """
    texts = render_conversation(row, reader, [*before, *answer], first=len(before))
    if not texts:
        raise_if_role_is_unknown(name, answer)
        raise RLHFError(f"`{name}` has no turn of the assistant after the prompt; end it with one")
    return texts[-1]


def raise_if_role_is_unknown(name: str, messages: Messages) -> None:
    """Raise RLHFError for messages without the assistant of which one has a role that no template
    knows."""
    roles = dict.fromkeys(message["role"] for message in messages)
    unknown = [role for role in roles if role not in KNOWN_ROLES]
    if unknown and "assistant" not in roles:
        raise RLHFError(
            f"`{name}` has no turn of the assistant, but the role {shown(unknown[0])}; write "
            "assistant"
        )


def _prompt_size(path: Encoded) -> int:
    """Return the number of tokens before the first one that is trained on."""
    return next((start for start, end in path.trained if start < end), len(path.ids))


def _answer(path: Encoded, size: int) -> Answer:
    """Return the tokens of a path after the first `size`."""
    tokens = path.ids[size:]
    mask = [False] * len(tokens)
    for start, end in path.trained:
        mask[start - size : end - size] = [True] * (end - start)
    return Answer(tokens, None if all(mask) else mask)


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts BOS before a text."""
    return Encoder(tokenizer).bos is not None
