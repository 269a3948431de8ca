"""Preference and unpaired rows: exact ids and masks, the shapes in the wild, and errors with the
row's name."""

import math
from pathlib import Path
from typing import Any

import pytest
from read_rows import read_rows
from word_rows import WHERE, made, read, refusal, said, texts, tokenizer_of, user, words

from rlhf_rows import Reader
from rlhf_rows.formats import _shared_text

PAIR = ["<user> say <assistant>", "one </s>", "two </s>"]
PAIRS = {
    "text": (
        {"prompt": "say", "chosen": "one", "rejected": "two"},
        ["say", "one </s>", "two </s>"],
    ),
    "text without a prompt": (
        {"chosen": "say one two", "rejected": "say one three four"},
        ["say one", "two </s>", "three four </s>"],
    ),
    "messages": (
        {"prompt": [user("say")], "chosen": [said("one")], "rejected": [said("two")]},
        PAIR,
    ),
    "a text prompt and messages": (
        {"prompt": "say", "chosen": [said("one")], "rejected": [said("two")]},
        PAIR,
    ),
    "a message prompt and text": (
        {"prompt": [user("say")], "chosen": "one", "rejected": "two"},
        PAIR,
    ),
    "messages that share their beginning": (
        {"chosen": [user("say"), said("one")], "rejected": [user("say"), said("two")]},
        PAIR,
    ),
    "a text prompt that the messages repeat": (
        {
            "prompt": "say ",
            "chosen": [user("say"), said("one")],
            "rejected": [user("say"), said("two")],
        },
        PAIR,
    ),
    "a message prompt that the messages repeat": (
        {
            "prompt": [user("say")],
            "chosen": [user("say"), said("one")],
            "rejected": [user("say"), said("two")],
        },
        PAIR,
    ),
    "a prompt before messages that share more": (
        {
            "prompt": "say",
            "chosen": [said("four"), user("five"), said("one")],
            "rejected": [said("four"), user("five"), said("two")],
        },
        ["<user> say <assistant> four </s> <user> five <assistant>", "one </s>", "two </s>"],
    ),
    "answers of several turns": (
        {
            "prompt": [user("say")],
            "chosen": [said("one"), user("five"), said("one")],
            "rejected": [said("two")],
        },
        [
            "<user> say <assistant>",
            "one </s> [<user>] [five] [<assistant>] one </s>",
            "two </s>",
        ],
    ),
    "tools": (
        {
            "prompt": [user("say")],
            "chosen": [said("one")],
            "rejected": [said("two")],
            "tools": [{"name": "add"}],
        },
        ["add <user> say <assistant>", "one </s>", "two </s>"],
    ),
    "hh": (
        {
            "chosen": "\n\nHuman: say\n\nAssistant: one\n\nHuman: five\n\nAssistant: one two",
            "rejected": "\n\nHuman: say\n\nAssistant: one\n\nHuman: five\n\nAssistant: one three",
        },
        [
            "Human: say Assistant: one Human: five Assistant:",
            "one two </s>",
            "one three </s>",
        ],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_one_prompt_and_two_answers(name: str) -> None:
    columns, expected = PAIRS[name]
    (row,) = read("preference", **columns)
    assert texts(row) == expected
    assert row.columns["ranks"] == [1.0, 2.0]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_becomes_two_unpaired_rows(name: str) -> None:
    columns, (prompt, chosen, rejected) = PAIRS[name]
    good, bad = read("unpaired", **columns)
    assert (words(good.prompt), texts(good)[1], good.columns["label"]) == (prompt, chosen, True)
    assert (words(bad.prompt), texts(bad)[1], bad.columns["label"]) == (prompt, rejected, False)


def test_ids_are_the_tokenizers_own_and_everything_of_an_answer_is_trained_on() -> None:
    (row,) = read("preference", prompt="say one", chosen="two", rejected="three four", margin=2)
    assert row.prompt == [6, 7]
    assert [answer.tokens for answer in row.answers] == [[8, 1], [9, 10, 1]]
    assert [answer.trained for answer in row.answers] == [None, None]
    assert row.columns["margin"] == 2.0


SHARED = [
    ("say one two", "say one three", "say one"),
    ("say one", "say one two", "say"),
    ("sayone two", "sayonetwo", ""),
    ("say\n\none", "say\n\ntwo", "say\n\n"),
    ("say one", "two", ""),
    ("ab cd", "abx", ""),
]


@pytest.mark.parametrize(("one", "other", "prompt"), SHARED)
def test_texts_are_cut_between_words_before_they_differ(one: str, other: str, prompt: str) -> None:
    size = _shared_text(one, other)
    assert (one[:size], other[:size]) == (prompt, prompt)
    assert _shared_text(other, one) == size


def test_a_template_whose_prompt_depends_on_the_answer_still_gives_one_prompt() -> None:
    # The prompt says how long the answer is.
    template = (
        "{% if messages[-1].content == 'four' %}{{ 'five ' }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '> ' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + ' </s> ' }}{% endgeneration %}"
        "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    )
    reader = Reader(tokenizer_of(template))
    columns = {"prompt": "say", "chosen": [said("one")], "rejected": [said("four")]}
    ((row,),) = read_rows("preference", [(WHERE, columns)], reader)
    assert texts(row) == [
        "",
        "[<user>] [say] [<assistant>] one </s>",
        "[five] [<user>] [say] [<assistant>] four </s>",
    ]


def test_ranked_rows_keep_their_order_and_get_ranks() -> None:
    answers = ["one", "two", "three"]
    (row,) = read("preference", prompt="say", answers=answers, ranks=[2, 1, 3])
    assert texts(row) == ["say", "one </s>", "two </s>", "three </s>"]
    assert row.columns["ranks"] == [2.0, 1.0, 3.0]
    (row,) = read("preference", prompt="say", answers=answers, scores=[0.5, 7, 0.5])
    assert row.columns["ranks"] == [2.0, 1.0, 2.0]
    assert row.columns["scores"] == [0.5, 7.0, 0.5]
    talk = [[said("one")], [said("two")]]
    (row,) = read("preference", prompt=[user("say")], answers=talk, scores=[1, 2])
    assert texts(row) == PAIR
    assert row.columns["ranks"] == [2.0, 1.0]


def test_answers_without_a_preference_give_no_row() -> None:
    assert read("preference", prompt="say", chosen="one", rejected="one") == []
    talk = [user("say"), said("one")]
    assert read("preference", chosen=talk, rejected=talk) == []
    assert read("unpaired", prompt="say", chosen="one", rejected="one") == []
    assert read("preference", prompt="say", answers=["one", "two"], scores=[3, 3]) == []


def test_an_empty_answer_is_trained_on_as_its_end() -> None:
    (row,) = read("preference", prompt="say", chosen="one", rejected="")
    assert texts(row) == ["say", "one </s>", "</s>"]
    (row,) = read("unpaired", prompt=[user("say")], completion=[said("")], label=False)
    assert texts(row) == ["<user> say <assistant>", "</s>"]


UNPAIRED = [
    {"prompt": [user("say")], "completion": [said("one")], "label": True},
    {"prompt": "say", "completion": [said("one")], "label": 1},
    {"prompt": [user("say")], "completion": "one", "label": 1.0},
    {"messages": [user("say"), said("one")], "label": True},
]


@pytest.mark.parametrize("columns", UNPAIRED)
def test_an_unpaired_row_is_one_answer_and_a_label(columns: dict[str, Any]) -> None:
    (row,) = read("unpaired", **columns)
    assert texts(row) == PAIR[:2]
    assert row.columns["label"] is True
    (row,) = read("unpaired", prompt="say", completion="two", label=False)
    assert (texts(row), row.columns["label"]) == (["say", "two </s>"], False)


PREFERENCE_NEEDS = (
    "a row needs `chosen` and `rejected`, with or without `prompt`, or `prompt`, `answers` and "
    "`ranks`, but this one has {}; rename columns with `columns` in data"
)
UNPAIRED_NEEDS = (
    "a row needs `prompt`, `completion` and `label`, or `prompt`, `chosen` and `rejected`, but "
    "this one has {}; rename columns with `columns` in data"
)
K_WISE = {"prompt": "say", "answers": ["one", "two"]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "preference",
        {"prompt": "say", "chosen": "one"},
        PREFERENCE_NEEDS.format("`prompt`, `chosen`"),
    ),
    ("preference", {}, PREFERENCE_NEEDS.format("nothing")),
    (
        "preference",
        {"chosen": [user("say"), said("one")], "rejected": [user("say")]},
        "`rejected` has no turn of the assistant after the prompt; end it with one",
    ),
    (
        "preference",
        {"prompt": "say", "chosen": 3, "rejected": "one"},
        "`chosen` must be text or a list of messages, not int",
    ),
    (
        "preference",
        {"chosen": "one", "rejected": "two", "margin": "much"},
        "`margin` must hold numbers, not text",
    ),
    (
        "preference",
        {"chosen": "one", "rejected": "two", "margin": math.inf},
        "`margin` must hold numbers, not inf",
    ),
    (
        "preference",
        {**K_WISE, "ranks": [1, 2], "margin": "0.5"},
        "`margin` must hold numbers, not text",
    ),
    ("preference", {**K_WISE, "ranks": [1]}, "1 rank for 2 answers; give one per answer"),
    ("preference", {**K_WISE, "scores": 3}, "int scores for 2 answers; give one per answer"),
    ("preference", {**K_WISE, "ranks": [1, True]}, "`ranks` must hold numbers, not bool"),
    (
        "preference",
        K_WISE,
        "a row needs `ranks` or `scores` with `answers`, but this one has `prompt`, `answers`; "
        "rename columns with `columns` in data",
    ),
    (
        "preference",
        {"prompt": "say", "answers": ["one"], "ranks": [1]},
        "`answers` has 1, but needs at least 2; remove the row",
    ),
    ("preference", {"prompt": "say", "answers": "one"}, "`answers` must be a list, not text"),
    (
        "unpaired",
        {"prompt": "say", "completion": "one"},
        UNPAIRED_NEEDS.format("`prompt`, `completion`"),
    ),
    (
        "unpaired",
        {"prompt": "say", "completion": "one", "label": "true"},
        "`label` is 'true'; use true or false",
    ),
    (
        "unpaired",
        {"prompt": "say", "completion": "one", "label": 2},
        "`label` is 2; use true or false",
    ),
    (
        "unpaired",
        {"messages": [user("say")], "label": True},
        "`messages` has no turn of the assistant after the prompt; end it with one",
    ),
    (
        "unpaired",
        {"prompt": "say", "completion": [], "label": True},
        "`completion` has no turn of the assistant after the prompt; end it with one",
    ),
]


@pytest.mark.parametrize(("format", "columns", "message"), REFUSED)
def test_a_wrong_row_is_named_with_what_to_do(
    format: str, columns: dict[str, Any], message: str
) -> None:
    assert refusal(format, **columns) == message


@pytest.mark.usefixtures("cache")
def test_a_cut_pair_is_dropped_if_no_difference_is_left(tmp_path: Path) -> None:
    rows = [
        {"prompt": "say", "chosen": "one two three four", "rejected": "five"},
        {"prompt": "say " * 5, "chosen": "one", "rejected": "two"},
        {"prompt": "say", "chosen": "one", "rejected": "one"},
        {"prompt": "say", "chosen": "one two three four", "rejected": "one two three five"},
    ]
    examples = made("preference", rows, tmp_path / "rows.jsonl", max_tokens=4, too_long="cut")
    (example,) = examples
    assert list(example.prompt) == [6]
    assert [list(answer.tokens) for answer in example.answers] == [[7, 8, 9], [11, 1]]
    assert (examples.report.cut, examples.report.empty) == (1, 3), (
        "of the last no difference is left"
    )
