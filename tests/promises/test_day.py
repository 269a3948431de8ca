"""A run keeps the day on which it was made, which its chat template prints."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.api import export
from rlhf.errors import RLHFError
from rlhf.folder.run_folder import day_of
from rlhf.launch.signals import DAY
from rlhf.request.reader import Request, read_config
from rlhf.train.dataset import Dataset, prepare_data
from rlhf.train.rank import of_one_day
from rlhf_devkit import tiny, without_timings

EAST, WEST = "EAST-14", "WEST+11"
"""Time zones 25 hours apart, as TZ has them: they never have the same day."""
TEMPLATE = (
    "{%- if not date_string is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date_string }}\n"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Words = Callable[..., list[str]]


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], date]]:
    """Sets the time zone and returns its day."""

    def to(zone: str) -> date:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return date.today()

    yield to
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The words of a run into a folder of this name, with a template that prints the date."""
    folder = tmp_path_factory.mktemp("day")
    template = folder / "dated.jinja"
    template.write_text(TEMPLATE)
    short = tiny.short_run(folder, "demonstration")
    at = short.index("--data.eval")
    held_out = short[at : at + 2]
    del short[at : at + 2]

    def make(output: str, *more: str, evaluated: bool = False) -> list[str]:
        return [
            *short, "--data.chat_template", str(template), *held_out * evaluated,
            "--checkpoint.every", "2", "--output", str(folder / output), *more,
        ]  # fmt: skip

    return make


def request(words: list[str]) -> Request:
    return read_config("sft", overrides=words)


def prompts(data: Dataset) -> set[str]:
    """The first lines of all rows."""
    rows = [example for part in data.parts.values() for example in part]
    return {data.trainer.tokenizer.decode(row.prompt).split("\n")[0] for row in rows}


def printed(day: date) -> str:
    return f"Today: {day:%d %b %Y}"


def test_a_run_resumed_on_another_day_with_more_rows_keeps_its_day(
    words: Words, move: Any, tmp_path: Path
) -> None:
    day = move(EAST)
    straight = tiny.run("sft", words("straight", evaluated=True), str(tmp_path / "a"), True)
    tiny.run("sft", words("halves", "--train.stop_at", "2"), str(tmp_path / "b"), True)
    assert move(WEST) < day
    again = words("halves", "--resume", evaluated=True)
    halves = tiny.run("sft", again, str(tmp_path / "c"), True)
    assert without_timings(halves)[-1] == without_timings(straight)[-1]
    assert "eval/loss" in halves[-1]
    folder = Path(again[again.index("--output") + 1])
    assert json.loads((folder / "summary.json").read_text())["day"] == day.isoformat()
    assert prompts(prepare_data(request(again))) == {printed(day)}
    # A new run prints its own day.
    assert prompts(prepare_data(request(words("new")))) == {printed(date.today())}


def test_the_exported_template_is_the_one_that_was_configured(words: Words, tmp_path: Path) -> None:
    given = words("exported")
    tiny.run("sft", given, str(tmp_path / "cache"), True)
    folder = Path(given[given.index("--output") + 1])
    assert (folder / "model/chat_template.jinja").read_text() == TEMPLATE
    export(folder, tmp_path / "model")
    assert (tmp_path / "model/chat_template.jinja").read_text() == TEMPLATE


def test_the_cache_of_a_template_without_a_clock_serves_every_day(
    words: Words, cache: Path
) -> None:
    def folders(*more: str) -> int:
        for day in (date(2026, 2, 3), date(2026, 2, 4)):
            prepare_data(request(words("unused", *more)), day)
        return len(list((cache / "examples").glob("*/digests.json")))

    assert folders("--data.chat_template", "chatml") == 1
    assert folders() == 1 + 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_argument_of_the_template_fixes_the_date(words: Words) -> None:
    fixed = words("unused", "--data.chat_template_kwargs", "{date_string: 26 Jul 2024}")
    assert prompts(prepare_data(request(fixed))) == {"Today: 26 Jul 2024"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            "{strftime_now: 26 Jul 2024}",
            "data.chat_template_kwargs: 'strftime_now' is not an argument of the chat template; "
            "remove it",
        ),
        (
            "{date_string: 2024-07-26}",
            "data.chat_template_kwargs.date_string: expected text, got a date; quote it: "
            "'2024-07-26' in YAML, \"'2024-07-26'\" in a shell",
        ),
    ],
)
def test_an_argument_that_cannot_fix_the_date_is_refused(
    value: str, problem: str, words: Words
) -> None:
    with pytest.raises(RLHFError) as error:
        prepare_data(request(words("unused", "--data.chat_template_kwargs", value)))
    assert str(error.value) == problem


def test_a_run_without_a_record_has_the_day_of_its_start(words: Words, tmp_path: Path) -> None:
    resumed = request(words("unused", "--resume", "--output", str(tmp_path)))
    assert day_of(resumed) == date.today()
    started = datetime.now() - timedelta(days=9)
    (tmp_path / "summary.json").write_text(json.dumps({"started": started.timestamp()}))
    assert day_of(resumed) == started.date()
    assert day_of(request(words("unused", "--output", str(tmp_path)))) == date.today()


def test_the_ranks_of_a_launcher_have_its_day(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DAY, "2026-02-03")
    assert prompts(prepare_data(request(words("unused")))) == {"Today: 03 Feb 2026"}


def test_ranks_that_start_on_different_days_take_that_of_the_first(words: Words) -> None:
    late = request(words("unused"))
    first = prepare_data(late, date(2026, 2, 3))
    mesh: Any = SimpleNamespace(on_rank_zero=lambda act: date(2026, 2, 3))
    assert of_one_day(late, first, mesh) is first
    other = of_one_day(late, prepare_data(late, date(2026, 2, 4)), mesh)
    assert (other.day, prompts(other)) == (date(2026, 2, 3), {"Today: 03 Feb 2026"})
