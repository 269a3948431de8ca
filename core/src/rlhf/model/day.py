"""Chat templates that print the date: otherwise rows would be other tokens in a run that is resumed
on another day.

Templates of Llama 3, SmolLM3, GPT-OSS and Granite print it by `strftime_now(format)`, which
transformers provides and which reads the clock. A run gives its templates a `strftime_now` of one
day, that on which it was made. It is part of the template's text: the cache of tokenised rows,
whose key has that text, does not mix days, and all that render with the tokenizer get the same day.
"""

import re
import string
from calendar import timegm
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

CLOCK = re.compile(r"\bstrftime_now\b")
DIRECTIVE = re.compile(r"%[-_0^#EO]?[a-zA-Z]")
"""A directive of strftime, perhaps with a flag."""
MARK = "{# the day of the run #}"
"""Stands before and after what is added to a template."""


def with_day(template: Any, day: date) -> Any:
    """Return a chat template, or several by name, for which it is always midnight of `day`; one
    that does not read the clock is returned as it is."""
    if isinstance(template, Mapping):
        return {name: with_day(each, day) for name, each in template.items()}
    if not isinstance(template, str) or not CLOCK.search(template):
        return template
    # A format that is not in the template's text, such as an argument, has common directives.
    common = {f"%{flag}{letter}" for flag in ("", "-") for letter in string.ascii_letters}
    texts = {name: text_of(name, day) for name in sorted({*common, *DIRECTIVE.findall(template)})}
    # A byte 0 stands for `%%` until all directives are replaced.
    steps = {"%%": "\0", **{name: text for name, text in texts.items() if text != name}, "\0": "%"}
    lines = [f"{{% set format = format|replace({old!r}, {new!r}) %}}" for old, new in steps.items()]
    macro = f"{{% macro strftime_now(format) %}}{''.join(lines)}{{{{ format }}}}{{% endmacro %}}"
    # Jinja drops the line break behind the mark: as before, the template begins a line.
    return f"{MARK}{macro}{MARK}\n{template}"


def without_day(template: Any) -> Any:
    """Return a chat template, or several by name, as it was before `with_day`."""
    if isinstance(template, Mapping):
        return {name: without_day(each) for name, each in template.items()}
    if not isinstance(template, str) or not template.startswith(MARK):
        return template
    return template.split(f"{MARK}\n", 1)[1]


def text_of(directive: str, day: date) -> str:
    """Return what strftime puts in place of a directive, in every time zone."""
    if directive[-1] in "zZ":
        return ""
    if directive[-1] == "s":
        return str(timegm(day.timetuple()))
    return datetime.combine(day, time()).strftime(directive)
