"""Chat templates that give the same text each time: otherwise rows would be other tokens in a
resumed run or on another machine.

Of what transformers and Jinja offer, the filter `random` and the function `lipsum` draw; a template
that uses them is refused. So is one that prints an object by mistake, such as a generator, which is
printed with its address.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rlhf.errors import RLHFError

OBJECT = re.compile(r"<[a-z][\w .<>-]* at 0x[0-9a-f]+>")
"""How Python prints an object that has no text of its own."""


@contextmanager
def without_draws(template: str, name: str) -> Iterator[None]:
    """Raise RLHFError if the block, which renders the template of this name, draws at random."""
    words = drawing(template)
    before = random.getstate() if words else None
    yield
    if words and random.getstate() != before:
        raise RLHFError(
            f"the chat template {name} gives another text each time, because it uses "
            f"`{'` or `'.join(words)}`; remove that from a copy of it, and set data.chat_template "
            "to the copy"
        )


@cache
def drawing(template: str) -> list[str]:
    """Return the names in a template by which it may draw."""
    return [word for word in ("random", "lipsum") if re.search(rf"\b{word}\b", template)]


def check_no_object(text: str, name: str, *given: Any) -> None:
    """Raise RLHFError if the text that the template of this name made of what it was `given` has
    the address of an object."""
    shown = OBJECT.search(text) if " at 0x" in text else None
    if shown and shown[0] not in json.dumps(given, default=str, ensure_ascii=False):
        raise RLHFError(
            f"the chat template {name} prints {shown[0]}, which is another text each time; print "
            "its content, as by `| list` or `| join`, in a copy of it, and set data.chat_template "
            "to the copy"
        )
