"""YAML: what it reads as something else than text is an error that says so, and no document ends
with a traceback."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.errors import RLHFError
from rlhf.request.reader import read_config
from rlhf.request.settings_tree import flow, to_tree
from rlhf.request.words import parse_words

QUOTE = "quote it: '...' in YAML, \"'...'\" in a shell"


def problem(path: Path, text: str, *words: str) -> str:
    """Return the error of a YAML file without the path of the file."""
    path.write_text(text)
    with pytest.raises(RLHFError) as caught:
        read_config("toy", overrides=[str(path), *words], inputs=False)
    return str(caught.value).replace(str(path), "FILE")


VALUES = [
    ("2026-11-28", "a date; quote it: '2026-11-28' in YAML, \"'2026-11-28'\" in a shell"),
    ("2026-11-28T10:30:00Z", f"a date; {QUOTE}"),
    ("2026-11-28 10:30:00.5", f"a date; {QUOTE}"),
    ("yes", f"true; {QUOTE}"),
    ("Off", f"false; {QUOTE}"),
    ("1.10", f"1.1; {QUOTE}"),
    ("7", "7; quote it: '7' in YAML, \"'7'\" in a shell"),
    ("!!binary aGk=", "binary data"),
    ("!!set {a, b}", "a set"),
    ("!!omap [a: 1]", '[["a", 1]]'),
    ("!!pairs [a: 1]", '[["a", 1]]'),
]


@pytest.mark.parametrize(("value", "got"), VALUES)
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("output", "output: {}"),
        ("model.revision", "model: {{revision: {}}}"),
        ("data.train.1.path", "data: {{train: [a.jsonl, {{path: {}}}]}}"),
        ("data.train.0.columns.prompt", "data: {{train: {{path: a, columns: {{prompt: {}}}}}}}"),
        ("model.freeze.0", "model: {{freeze: [{}]}}"),
        ("lora.targets.1", "lora: {{targets: [q_proj, {}]}}"),
    ],
)
def test_a_value_that_is_not_text_in_yaml_is_named(
    setting: str, text: str, value: str, got: str, toy: Path
) -> None:
    expected = f"{setting}: expected text, got {got}"
    assert problem(toy / "c.yaml", text.format(value)) == expected


def test_dates_are_named_where_something_else_is_expected(toy: Path) -> None:
    file, date = toy / "c.yaml", "2026-11-28"
    assert problem(file, f"lora: {date}") == "lora.rank: expected a whole number, got a date"
    assert problem(file, f"optim: {{schedule: {date}}}") == (
        "optim.schedule: expected one of constant, linear, cosine, got a date"
    )
    quoted = f"quote it: '{date}' in YAML, \"'{date}'\" in a shell"
    assert problem(file, f"lora: {{targets: {date}}}") == (
        f"lora.targets: expected text or a list, got a date; {quoted}"
    )
    text = f"data: {{chat_template_kwargs: {{day: {date}, more: [1, {{day: !!binary aGk=}}]}}}}"
    assert problem(file, text).splitlines()[1:] == [
        f"  data.chat_template_kwargs.day: expected text, got a date; {quoted}",
        "  data.chat_template_kwargs.more.1.day: expected text, got binary data",
    ]
    assert problem(file, date) == (
        "FILE contains a date; expected sections such as `optim: {lr: 1e-5}`"
    )


NUMBERS = [
    ("010", 8),
    ("-017", -15),
    ("00", 0),
    ("12:30:45", 45045),
    ("1:30", 90),
    ("1:30.5", 90.5),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_that_yaml_reads_in_another_base_is_refused(
    text: str, number: float, toy: Path
) -> None:
    for setting in ("output", "batch"):
        assert problem(toy / "c.yaml", f"model: tiny\n{setting}: {text}") == (
            f"FILE line 2: {text} is the number {number} in YAML; quote it, or write {number}"
        )
    (words,) = parse_words([f"--output={text}"]).overrides
    assert words == ("output", text)


@pytest.mark.parametrize(
    "key", ["on", "No", "~", "null", "5", "010", "1.5", "2026-11-28", "=", "!!int 7"]
)
def test_keys_are_text_as_they_are_written(key: str, toy: Path) -> None:
    file, name = toy / "c.yaml", key.rpartition(" ")[2]
    assert problem(file, f"optim: {{{key}: 1}}").startswith(f"optim.{name}: unknown setting")
    assert problem(file, f"{key}: 1\n{key}: 2") == f"FILE line 2: duplicate key '{name}'"
    file.write_text(f"data: {{train: {{path: a, columns: {{{key}: b}}}}}}")
    config = read_config("toy", overrides=[str(file)], inputs=False).config
    assert config.data.train[0].columns == {name: "b"}


def test_merged_keys_are_no_duplicates(toy: Path) -> None:
    file = toy / "c.yaml"
    file.write_text(
        "model: &tiny {path: tiny, dtype: fp32}\n"
        "data:\n  chat_template_kwargs: {a: &one {<<: *tiny, path: other}}\n"
        "batch: {size: 4}\noptim: {<<: {lr: 1.0, clip: 2}, lr: 0.5}\n"
        "lora: {<<: [{rank: 4}, {alpha: 2}]}\n"
        "toy: {<<: {beta: 0.5}}\n"
    )
    config: Any = read_config("toy", overrides=[str(file)], inputs=False).config
    assert config.data.chat_template_kwargs == {"a": {"path": "other", "dtype": "fp32"}}
    assert (config.optim.lr, config.optim.clip) == (0.5, 2.0)
    assert (config.lora.rank, config.lora.alpha, config.own.beta) == (4, 2.0, 0.5)
    text = "a: &b {x: 1}\nc: {d: &m {<<: *b, x: 2}}\ne: {<<: *m, y: 3}"
    assert "duplicate" not in problem(file, text)


UNREADABLE = [
    (
        "output: 2026-13-45",
        "FILE line 1: 2026-13-45 is not a valid timestamp; quote it if it is text",
    ),
    ("a: b\nc: 0b_", "FILE line 2: 0b_ is not a valid int; quote it if it is text"),
    ("output: !!bool x", "FILE line 1: x is not a valid bool; quote it if it is text"),
    ("output: !!int x", "FILE line 1: x is not a valid int; quote it if it is text"),
    ("output: !!timestamp x", "FILE line 1: x is not a valid timestamp; quote it if it is text"),
    (
        f"output: {'9' * 5000}",
        f"FILE line 1: {'9' * 40} is not a valid int; quote it if it is text",
    ),
    ("a: &a [*a]", "FILE line 1: found unconstructable recursive node"),
    ("&a {a: *a}", "FILE line 1: found unconstructable recursive node"),
    (f"a: {'[' * 1000}", "FILE is not valid YAML: it is nested too deeply"),
    ('output: "\\U00110000"', "FILE is not valid YAML: chr() arg not in range(0x110000)"),
    ("? [a]\n: b", "FILE line 1: found unhashable key"),
    (
        "optim: {lr: 1\x00}",
        "FILE is not valid YAML: unacceptable character #x0000: special characters are not allowed",
    ),
]


@pytest.mark.parametrize(("text", "expected"), UNREADABLE)
def test_yaml_that_cannot_be_read_is_an_error_with_the_line(
    text: str, expected: str, toy: Path
) -> None:
    assert problem(toy / "c.yaml", text) == expected


def test_a_number_that_is_too_large_for_a_float_is_refused(toy: Path) -> None:
    assert problem(toy / "c.yaml", f"optim: {{lr: {'9' * 400}}}") == (
        f"optim.lr: expected a number, got {'9' * 400}"
    )


@pytest.mark.parametrize("name", ["my file #1.csv", "#1", "a # b", "run #2/rows.csv"])
def test_a_number_sign_begins_no_comment_on_the_command_line(name: str) -> None:
    assert parse_words(["--data.train", name]).overrides == (("data.train", name),)


SCALARS = [
    "yes", "~", "010", "12:30:45", "2026-11-28", "2026-13-45", "!!binary aGk=", "!!set {a, b}",
    "!!omap [a: 1]", "!!int x", "!!bool x", "!!python/name:os.system", "&a b", "*a", "&a [*a]",
    "<<", "{<<: *a}", "=", "0x_", ".nan", "-.inf", "1e5", "'", '"\\U00110000"', '"\\uD800"', "|",
    "[", "]", "{", "}", "? a", "- a", "1", "9" * 400, "", "---", "\t", "#", "@x", "`", "\x85",
    "{path: x, columns: {on: yes}}", "{? {a: 1} : b}", "!!seq {a: 1}", "? [a]\n: b",
]  # fmt: skip
KEYS = ["model", "data", "train", "lora", "observers", "backend", "extensions", "toy", "on", "~"]
KEYS += ["path", "targets", "steps", "columns", "chat_template_kwargs", "<<", "2026-11-28", "5"]


def flows(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Lists and mappings of these texts."""
    pairs = st.tuples(st.sampled_from(KEYS), inner).map(": ".join)
    lists = st.lists(inner, max_size=3).map(", ".join).map("[{}]".format)
    return lists | st.lists(pairs, max_size=3).map(", ".join).map("{{{}}}".format)


VALUE = st.recursive(st.sampled_from(SCALARS) | st.text(max_size=6), flows, max_leaves=4)
LINE = st.tuples(st.sampled_from(KEYS), VALUE).map(": ".join)
DOCUMENT = st.lists(LINE, max_size=4).map("\n".join) | VALUE


@settings(
    max_examples=300, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(text=DOCUMENT)
def test_no_document_ends_with_a_traceback(text: str, toy: Path) -> None:
    file: Any = toy / "c.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    for words in ([str(file)], [f"--data={text}"], [f"--toy={text}"]):
        with suppress(RLHFError):
            flow(to_tree(read_config("toy", overrides=words, inputs=False).config))
