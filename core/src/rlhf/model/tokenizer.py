"""The tokenizer of a configuration: its chat template, the tokens that end answers, padding."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from huggingface_hub import get_session
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from jinja2.defaults import DEFAULT_NAMESPACE
from transformers import AutoTokenizer

from rlhf.config.sections import Config, ModelConfig
from rlhf.config.source_names import check_model_folder
from rlhf.data.turns import in_parts, special_tokens, turn_ending
from rlhf.errors import RLHFError, first_line
from rlhf.model.architecture import needs_code, resolved, saved_config, untrusted
from rlhf.model.day import with_day
from rlhf.model.stored import TEMPLATES, TOKENIZER, damaged_file, model_folder

CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
"""The template that many models share, for `data.chat_template: chatml`. It refuses what ChatML
cannot express."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""Where older checkpoints of models that read images have their template."""
PADDING = "<|pad|>"
"""The padding token for a tokenizer without its own."""

NO_ARGUMENTS = {
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now",
    *DEFAULT_NAMESPACE,
}  # fmt: skip
"""Names in a chat template that no argument sets."""

BYTE_ZERO = ("<0x00>", "\u0100")
"""The byte 0 in vocabularies of SentencePiece and of byte-level BPE; no text ends with it."""


def load_tokenizer(config: Config, day: date | None = None) -> Any:
    """Return the tokenizer of a configuration, with its chat template and arguments. If the
    template prints the date, it is that of `day`; None leaves the template as it is."""
    tokenizer, data = read_tokenizer(config.model), config.data
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(data.chat_template)
    elif isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise RLHFError(
            f"the tokenizer has the chat templates {', '.join(tokenizer.chat_template)}, and none "
            "is called default; set data.chat_template to a file with one of them"
        )
    if data.chat_template_kwargs:
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, data.chat_template_kwargs)
    if day is not None:
        tokenizer.chat_template = with_day(tokenizer.chat_template, day)
    return tokenizer


def read_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer of a model as it is."""
    revision = None if model.tokenizer else model.revision
    setting = "model.tokenizer" if model.tokenizer else "model.path"
    path = resolved(model.tokenizer or model.path, setting)
    if not model.tokenizer:
        check_model_folder(path)
    if not Path(path).is_dir():
        limit_waits()
    folder = model_folder(path, revision) or path
    if damaged := damaged_file(folder, TEMPLATES):
        raise damaged
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # A damaged folder may raise anything.
        if not model.tokenizer:
            saved_config(model)  # It is read with the tokenizer, and may be what is wrong.
        if needs_code(error):
            raise untrusted(f"the tokenizer in {path}") from error
        raise damaged_file(folder, TOKENIZER) or RLHFError(
            f"no tokenizer in {path} ({first_line(error)}); check the name, or set model.tokenizer"
        ) from error
    template = Path(folder) / PROCESSOR_TEMPLATE
    if tokenizer.chat_template is None and template.is_file():
        tokenizer.chat_template = json.loads(template.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def with_defaults(template: Any, values: Mapping[str, Any]) -> str:
    """Return a chat template in which its arguments have these values unless they are passed.

    Raises RLHFError for an argument that the template does not use.
    """
    if not isinstance(template, str):
        raise RLHFError(
            "data.chat_template_kwargs needs one chat template, and the tokenizer has "
            f"{'several' if template else 'none'}; set data.chat_template"
        )
    for name in values:
        if name in NO_ARGUMENTS or not re.search(rf"\b{name}\b", template):
            raise RLHFError(
                f"data.chat_template_kwargs: {name!r} is not an argument of the chat template; "
                "remove it"
            )
    # Python's literals are Jinja's.
    lines = [f"{{% set {n} = {n} if {n} is defined else {v!r} +%}}" for n, v in values.items()]
    return "".join([*lines, template])


def read_template(name: str) -> str:
    """Return the chat template of a file, or ours called `chatml`."""
    if name == "chatml":
        return CHATML
    if not Path(name).is_file():
        raise RLHFError(
            f"data.chat_template {name} is not a file; pass a file with a Jinja template, or chatml"
        )
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RLHFError(f"cannot read data.chat_template {name}: {first_line(error)}") from error


def with_padding(tokenizer: Any, num_embeddings: int) -> Any:
    """Return a copy of the tokenizer whose padding token ends no answer.

    The first that serves: its own; a new one, if the embedding has a row for it; its unknown
    token; its BOS; the byte 0. Raises RLHFError if none does.
    """
    tokenizer = copy.deepcopy(tokenizer)
    ends = end_tokens(tokenizer)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer
    if len(tokenizer) < num_embeddings:
        tokenizer.add_special_tokens({"pad_token": PADDING})
        return tokenizer
    known = tokenizer.get_vocab()
    for token in (tokenizer.unk_token, tokenizer.bos_token, *BYTE_ZERO):
        if token in known and known[token] not in ends:
            tokenizer.pad_token = token
            return tokenizer
    raise RLHFError(
        f"the tokenizer's only padding token {tokenizer.pad_token or tokenizer.eos_token!r} ends "
        "answers, and the embedding has no row for another: set pad_token in its "
        "tokenizer_config.json to a token that no answer ends with"
    )


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the special token that the chat template puts after an
    assistant's message, if there is one, and the tokenizer's EOS."""
    ends = [turn_end(tokenizer), tokenizer.eos_token_id]
    return list(dict.fromkeys(end for end in ends if end is not None))


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after any assistant's message."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ending = turn_ending(lambda messages: _rendered(tokenizer, messages), special_tokens(tokenizer))
    return int(tokenizer.convert_tokens_to_ids(ending[1].group())) if ending else None


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a conversation as text; None if the template refuses it, or drops its last turn."""
    for shaped in (messages, list(map(in_parts, messages))):
        with suppress(Exception):  # A template is a program of its author.
            text: str = tokenizer.apply_chat_template(shaped, tokenize=False)
            if messages[-1]["content"] in text:
                return text
    return None


def limit_waits() -> None:
    """Give requests of huggingface_hub that would wait for ever, such as those for the description
    of a model, the limit of its downloads."""
    session: Any = get_session()
    hooks = session.event_hooks
    if _limit not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _limit]}


def _limit(request: Any) -> None:
    waits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        name: wait or HF_HUB_DOWNLOAD_TIMEOUT for name, wait in waits.items()
    }
