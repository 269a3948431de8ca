"""The shipped rules, against values worked by hand."""

import re
from typing import Any

import pytest

from rlhf.errors import RLHFError
from rlhf_rollouts.rewards import rules
from rlhf_rollouts.rewards.functions import load


def test_exact_compares_the_whole_answer_and_its_last_line() -> None:
    answers = ["5", " 5 \n", "2 + 3\n5\n", "5 apples", "", "5\n6"]
    assert rules.exact(answers, answer=["5"] * 6) == [1, 1, 1, 0, 0, 0]
    assert rules.exact(["x", "a\nb"], column="text", text=[None, "a\nb"]) == [None, 1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 5.", "5"),
        ("5 apples and 7.50 dollars", "7.5"),
        ("1,234.50", "1234.5"),
        ("12,34", "34"),
        ("x = -5", "-5"),
        ("10-5", "5"),
        ("\u22122", "-2"),
        (".25", "0.25"),
        ("2e3", "2000"),
        ("#### 72", "72"),
        ("$\\frac{1}{2}$", "2"),
        ("007", "7"),
    ],
)
def test_number_reads_the_last_number(text: str, number: str) -> None:
    assert rules.number([text], answer=[number]) == [1]
    assert rules.number(["The sum is 3"], answer=[text]) == [0]


def test_number_scores_no_row_without_a_number() -> None:
    assert rules.number(["5", "5"], answer=["five", None]) == [None, None]
    assert rules.number(["none", "5"], answer=["5", 5]) == [0, 1]


def test_boxed_reads_the_last_box_or_what_follows_the_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "HAS_MATH_VERIFY", False)
    answers = [
        r"\boxed{4}, no: \boxed{\frac{1}{2}}", r"so \boxed{ \frac {1}{2} }.", "half\n#### 1/2\nok",
        r"\boxed{\frac{1}{2}", r"\frac{1}{2}",
    ]  # fmt: skip
    assert rules.boxed(answers, answer=[r"It is \boxed{\frac{1}{2}}"] * 5) == [1, 1, 0, 0, 0]
    assert rules.boxed(["#### 1,000.0", "#### $5"], answer=["#### 1000", "5"]) == [1, 1]
    assert rules.boxed([r"\boxed{5}"], answer=[None]) == [None]


@pytest.mark.skipif(not rules.HAS_MATH_VERIFY, reason="math-verify is not installed")
def test_boxed_compares_mathematics_with_math_verify() -> None:
    answers = [r"\boxed{\frac{1}{2}}", r"\boxed{x + 1}", r"\boxed{0.3}"]
    assert rules.boxed(answers, answer=["0.5", "1 + x", "0.5"]) == [1, 1, 0]


def test_format_matches_the_whole_answer() -> None:
    pattern = "<think>.*</think>.+"
    answers = ["<think>a\nb</think>5", "x<think></think>5", "<think></think>"]
    assert rules.format(answers, pattern=pattern) == [1, 0, 0]


def test_soft_overlong_is_equation_13_of_dapo() -> None:
    # L = 100, C = 20: free up to 80, at 90 half of the penalty, at 100 all of it.
    ids = [[0] * size for size in (0, 80, 81, 90, 100, 101)]
    scores = rules.soft_overlong(ids, max_tokens=100, buffer_tokens=20)
    assert scores == [0, 0, -0.05, -0.5, -1, -1]


def test_repetition_is_the_share_of_repeated_n_grams() -> None:
    # Of 5 5 5 5 5 all four pairs are equal: 1 - 1/4. Of 1 2 1 2 two of three differ: 1 - 2/3.
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2], [1], []]
    scores = rules.repetition(ids, size=2, penalty=-1.0)
    assert scores == pytest.approx([0, -0.75, -1 / 3, 0, 0], abs=1e-15)
    assert rules.repetition([[5] * 5], penalty=-0.5) == pytest.approx([-0.5 * 2 / 3])


def test_rules_read_the_last_message_of_a_conversation() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "5"}]
    answers = [
        [{"role": "assistant", "content": "3"}, {"role": "assistant", "content": "5"}],
        [{"role": "assistant", "content": parts}],
        [{"role": "assistant", "content": None}],
    ]
    assert rules.number(answers, answer=["5"] * 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("format", {}, "needs the option 'pattern'; set it in `options`"),
        ("format", {"pattern": "("}, "pattern '(' is not a regular expression: missing ), "
         "unterminated subpattern at position 0"),
        ("number", {"colunm": "x"}, "has no option 'colunm'; available: column"),
        ("number", {"prompts": "x"}, "has no option 'prompts'; available: column"),
        ("soft_overlong", {"max_tokens": 5}, "needs the option 'buffer_tokens'; set it in "
         "`options`"),
        ("soft_overlong", {"max_tokens": 5, "buffer_tokens": 6},
         "buffer_tokens 6 must be at most max_tokens 5"),
        ("soft_overlong", {"max_tokens": 5, "buffer_tokens": 0},
         "buffer_tokens must be a whole number above 0, not 0"),
        ("repetition", {"size": 2.5}, "size must be a whole number above 0, not 2.5"),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_scored(
    rule: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RLHFError, match=f"^{re.escape(message)}$"):
        load(rule, options)


def test_a_rule_needs_the_column_that_its_option_names() -> None:
    assert load("number", {}).columns == ("answer",)
    assert load("boxed", {"column": "solution"}).columns == ("solution",)
    assert load("repetition", {}).columns == ()
