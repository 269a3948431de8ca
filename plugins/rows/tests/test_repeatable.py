"""A chat template that gives another text each time is refused by name; what only looks so is
not."""

import random
from typing import Any

import pytest
from chat_templates import CHATML, tokenizer_of
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from transformers.utils.chat_template_utils import _compile_jinja_template

from rlhf.errors import RLHFError
from rlhf_rows import encode

QUESTION = [{"role": "user", "content": "Where?"}]
ANSWER = [{"role": "assistant", "content": "Here."}]


def tokens(template: str, **options: Any) -> list[int]:
    tokenizer = tokenizer_of("words", template)
    return encode(tokenizer, QUESTION, ANSWER, **options).prompt


def refusal(template: str, **options: Any) -> str:
    with pytest.raises(RLHFError) as error:
        tokens(template, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("start", "word"),
    [
        ("{{ ['a', 'b'] | random }}", "random"),
        ("{{ lipsum(n=1) }}", "lipsum"),
        ("{% set greeting = ['a', 'a'] | random %}{{ greeting }}", "random"),
        ("{{ [['a', 'b']] | map('random') | join }}", "random"),
        ("{# lipsum #}{{ [1, 2] | random }}", "random` or `lipsum"),
    ],
)
def test_a_template_that_draws_is_refused(start: str, word: str) -> None:
    random.seed(0)
    assert refusal(start + CHATML) == (
        "the chat template of the tokenizer gives another text each time, because it uses "
        f"`{word}`; remove that from a copy of it, and set data.chat_template to the copy"
    )


def test_a_template_that_draws_only_with_tools_is_refused_there() -> None:
    template = "{% if tools %}{{ tools }}{{ [1, 2, 3] | random }}{% endif %}" + CHATML
    assert tokens(template) == tokens(CHATML)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert "because it uses `random`" in refusal(template, tools=tools)


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("{{ messages | map(attribute='role') }}", "<generator object sync_do_map"),
        ("{{ messages[0].content.upper }}", "<built-in method upper of str object"),
        ("{{ joiner() }}", "<jinja2.utils.Joiner object"),
        ("{{ raise_exception }}", "<locals>.raise_exception"),
    ],
)
def test_a_template_that_prints_an_object_is_refused(start: str, shown: str) -> None:
    message = refusal(start + CHATML)
    assert message.startswith("the chat template of the tokenizer prints <")
    assert shown in message
    assert message.endswith(
        ">, which is another text each time; print its content, as by `| list` or `| join`, in a "
        "copy of it, and set data.chat_template to the copy"
    )


@pytest.mark.parametrize(
    "start",
    [
        "a random word of lipsum {# random #}",
        "{% set turn = cycler('a', 'b') %}{{ turn.next() }}{% set comma = joiner() %}{{ comma() }}",
        "{{ {'b': 1, 'a': 2} }}{{ namespace(a=1) }}{{ range(3) | list }}",
        "{{ messages[:1] | map(attribute='role') | unique | join }}",
    ],
)
def test_a_template_that_only_looks_so_is_not_refused(start: str) -> None:
    template = start + CHATML
    assert tokens(template) == tokens(template)


def test_an_address_in_a_row_is_not_the_templates() -> None:
    messages = [{"role": "user", "content": "What is <generator object f at 0x7f3a>?"}]
    tokenizer = tokenizer_of("words", CHATML)
    assert encode(tokenizer, messages, ANSWER).prompt


def test_the_template_can_call_nothing_else_that_draws_or_reads_a_clock() -> None:
    """If transformers or Jinja adds a function or a filter, it belongs here once somebody has
    looked at whether its result is the same each time."""
    environment = _compile_jinja_template(CHATML).environment
    added = environment.globals.keys() - DEFAULT_NAMESPACE.keys()
    assert added <= {"raise_exception", "strftime_now"}
    assert DEFAULT_NAMESPACE.keys() <= {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
    assert environment.filters.keys() == DEFAULT_FILTERS.keys()
    assert len(DEFAULT_FILTERS) == 54
