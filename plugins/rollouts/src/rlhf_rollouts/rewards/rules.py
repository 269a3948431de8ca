"""The shipped rules: functions with TRL's signature whose options are keyword arguments.

Each answer is scored by itself. A text that is a list of messages is read as the content of its
last message. An answer whose row has no value to compare with is unscorable: None.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from rlhf.errors import RLHFError

Values = list[float | None]
NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
)
"""A number, with commas between thousands. A hyphen after a word or a number is not its sign."""
HAS_MATH_VERIFY = find_spec("math_verify") is not None


def exact(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> Values:
    """Return 1 for an answer that equals the text in `column`, whole or in its last line, else 0.
    Blanks around both do not count."""

    def score(answer: str, wanted: Any) -> float | None:
        wanted = text_of(wanted).strip()
        lines = answer.strip().splitlines() or [""]
        return float(wanted in (answer.strip(), lines[-1].strip()))

    return compared(completions, columns[column], score)


def number(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> Values:
    """Return 1 for an answer whose last number equals the last number in `column`, else 0: 1,234.50
    equals 1234.5. Without a number in `column` the answer is unscorable."""

    def score(answer: str, wanted: Any) -> float | None:
        right = last_number(text_of(wanted))
        return None if right is None else float(last_number(answer) == right)

    return compared(completions, columns[column], score)


def boxed(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> Values:
    r"""Return 1 for an answer whose last \boxed{...} equals that in `column`, else 0. Without a
    box, what follows the last #### counts (as in GSM8K); in `column` else the whole text.

    Both are compared by math-verify if it is installed, which knows that 1/2 equals \frac{1}{2},
    else as text without blanks and as numbers.
    """

    def score(answer: str, wanted: Any) -> float | None:
        right = final_answer(text_of(wanted)) or text_of(wanted).strip()
        written = final_answer(answer)
        return float(written is not None and same_mathematics(written, right))

    return compared(completions, columns[column], score)


def format(completions: Sequence[Any], *, pattern: str, **columns: Any) -> Values:
    """Return 1 for an answer that the regular expression `pattern` matches as a whole, else 0; a
    point also matches a line break."""
    try:
        matches = re.compile(pattern, re.DOTALL).fullmatch
    except (re.error, TypeError) as error:
        raise RLHFError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    return [float(matches(text_of(completion)) is not None) for completion in completions]


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_tokens: int, buffer_tokens: int, **columns: Any
) -> Values:
    """Return DAPO's penalty of long answers (arXiv 2503.14476, equation 13). With y the answer, L
    `max_tokens` and C `buffer_tokens`, it is 0 where |y| <= L - C, ((L - C) - |y|) / C where
    L - C < |y| <= L, and -1 where |y| > L."""
    check_counts(max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    if buffer_tokens > max_tokens:
        raise RLHFError(f"buffer_tokens {buffer_tokens} must be at most max_tokens {max_tokens}")
    free = max_tokens - buffer_tokens

    def score(size: int) -> float:
        if size <= free:
            return 0.0
        return (free - size) / buffer_tokens if size <= max_tokens else -1.0

    return [score(len(ids)) for ids in completion_ids]


def repetition(
    completion_ids: Sequence[Sequence[int]],
    *,
    size: int = 3,
    penalty: float = -1.0,
    **columns: Any,
) -> Values:
    """Return `penalty` times the share of an answer's token n-grams that repeat an earlier one:
    penalty (1 - distinct / all), with n = `size` (arXiv 2502.03373, appendix C.2, as in TRL). An
    answer with fewer than n tokens gets 0."""
    check_counts(size=size)
    scores: Values = []
    for ids in completion_ids:
        grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        scores.append(repeated * penalty if repeated else 0.0)
    return scores


def compared(completions: Sequence[Any], wanted: Sequence[Any], score: Any) -> Values:
    """Return `score(answer, value)` of each answer; None where the row has no value."""
    pairs = zip(completions, wanted, strict=True)
    return [None if value is None else score(text_of(answer), value) for answer, value in pairs]


def check_counts(**options: Any) -> None:
    """Raise RLHFError for an option that is not a whole number above 0."""
    for name, value in options.items():
        if type(value) is not int or value < 1:
            raise RLHFError(f"{name} must be a whole number above 0, not {value!r}")


def text_of(value: Any) -> str:
    """Return a text, or the content of the last one of its messages, as text."""
    if isinstance(value, list | tuple) and value and isinstance(value[-1], dict):
        content = value[-1].get("content") or ""
        if isinstance(content, str):
            return content
        return "".join(part.get("text") or "" for part in content)
    return str(value)


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text; None without one."""
    numbers = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def final_answer(text: str) -> str | None:
    r"""Return what is in the last \boxed{...} of a text, else what follows its last ####."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        start, depth = start + len("\\boxed{"), 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place].strip()
        return None
    _, marked, after = text.rpartition("####")
    return after.strip().partition("\n")[0].strip() if marked else None


def same_mathematics(written: str, right: str) -> bool:
    """Return whether two answers are equal, by math-verify if it is installed."""
    if plain(written) == plain(right):
        return True
    if not HAS_MATH_VERIFY:
        return False
    # Importing sympy takes long.
    from math_verify import parse, verify

    known, other = (parse(f"\\boxed{{{text}}}") for text in (right, written))
    return bool(verify(known, other))


def plain(text: str) -> str | Decimal:
    """Return an answer as a number if it is one, else as text without blanks and dollar signs."""
    bare = re.sub(r"[\s$]", "", text).rstrip(".")
    return Decimal(bare.replace(",", "")) if NUMBER.fullmatch(bare) else bare
