"""The day that a chat template prints is fixed, whatever it prints of it."""

import time
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any
from unittest.mock import patch

import pytest
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.model.day import with_day, without_day
from rlhf.model.tokenizer import CHATML

DAY = date(2026, 2, 3)
TEMPLATES = {
    "a date": "{{ strftime_now('%d %b %Y') }}",
    "a line break first": "\n{{ strftime_now('%d%') }}",
    "blanks before a block": "  {% if strftime_now %}\n  {{ strftime_now('') }}x{% endif %}",
    "a keyword": "{{ strftime_now(format='%A, %-d. %B %y') }}",
    "double signs": "{{ strftime_now('%% %%d %%%d %m%%') }}",
    "the time of the day": "{{ strftime_now('%c|%H:%M:%S.%f %p|%F %T%n%t%j') }}",
    "flags": "{{ strftime_now('%^a %#d %Ey %Od %_d %0e') }}",
    "another name": "{% set now = strftime_now %}{{ now('%Y') | int + 1 }}",
    "a macro": "{% macro day(f) %}{{ strftime_now(f) | upper }}{% endmacro %}{{ day('%b') }}",
    "a block": "{% block head %}{{ strftime_now('%y') }}{% endblock %}",
    "a format made of parts": "{{ strftime_now('%' ~ 'd %' ~ '-m') }}",
    "a function": "{{ strftime_now is callable }}{{ strftime_now('%U') is string }}",
}


class FixedClock(datetime):
    """The clock of transformers, at midnight of the day."""

    @classmethod
    def now(cls, tz: Any = None) -> "FixedClock":
        return cls(DAY.year, DAY.month, DAY.day)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the time zone."""

    def move(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def rendered(template: str) -> str:
    texts, _ = render_jinja_template(conversations=[[]], chat_template=template)
    return str(texts[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_prints_its_day_as_it_would_print_that_of_the_clock(name: str) -> None:
    with patch.object(chat_template_utils, "datetime", FixedClock):
        expected = rendered(TEMPLATES[name])
    assert rendered(with_day(TEMPLATES[name], DAY)) == expected


def test_the_text_is_the_same_in_every_time_zone(anywhere: Any) -> None:
    template = "{{ strftime_now('%s [%z%Z%-Z] %c') }}"
    texts = set()
    for zone in ("EAST-14", "WEST+11"):
        anywhere(zone)
        texts.add(rendered(with_day(template, DAY)))
    assert texts == {"1770076800 [] Tue Feb  3 00:00:00 2026"}


def test_a_template_gets_its_own_text_back() -> None:
    several = {"default": TEMPLATES["a line break first"], "tool_use": CHATML}
    for template in (*TEMPLATES.values(), several):
        fixed = with_day(template, DAY)
        assert fixed != template
        assert without_day(fixed) == template


@pytest.mark.parametrize("template", [None, CHATML, {"default": CHATML}])
def test_a_template_without_a_clock_is_not_touched(template: Any) -> None:
    assert with_day(template, DAY) == template
    assert without_day(template) == template
