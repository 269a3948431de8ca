"""The format `rewarded`: answers with a reward each.

What a trainer with `row_format = "rewarded"` gets in `example(row)`: a `Row` whose
`columns["rewards"]` has a number for each of its answers. Rows:

- `{"prompt", "completion", "reward"}`, text or messages;
- `{"prompt", "completions", "rewards"}` (or `answers` in place of `completions`): several answers
  to one prompt, which is computed once for all of them;
- `{"sample", "reward"}`: trlX's samples. One is text that is an answer as a whole, or a list of
  texts, the first a prompt and every second one an answer.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from rlhf.errors import RLHFError, counted
from rlhf_rows import (
    Columns,
    Reader,
    Rendered,
    Unencoded,
    has,
    join_paths,
    missing_columns,
    render_answers,
    render_text,
    row_format,
    shown,
    type_name,
)

LARGEST = 1e18
"""Squares of rewards up to it are far inside the range of float32."""


@row_format
def rewarded(row: Columns, reader: Reader) -> list[Unencoded]:
    """Read the rows that the module describes."""
    if has(row, "sample", "reward"):
        return _with_rewards([_sample(row["sample"])], row, [row["reward"]])
    if has(row, "prompt", "completion", "reward"):
        paths = render_answers(row, reader, ["completion"], [row["completion"]])
        return _with_rewards(paths, row, [row["reward"]])
    column = next((name for name in ("completions", "answers") if has(row, name)), "")
    if not column or not has(row, "prompt", "rewards"):
        raise missing_columns(
            row, "`prompt`, `completion` and `reward`, or `prompt`, `completions` and `rewards`"
        )
    answers, rewards = row[column], row["rewards"]
    for name in (column, "rewards"):
        if not isinstance(row[name], list):
            raise RLHFError(f"`{name}` must be a list, not {type_name(row[name])}")
    if not answers:
        raise RLHFError(f"`{column}` is empty; remove the row")
    if len(answers) != len(rewards):
        found = f"{counted(len(rewards), 'reward')} for {counted(len(answers), 'answer')}"
        raise RLHFError(f"{found}; give one per answer")
    names = [f"{column}[{number}]" for number in range(len(answers))]
    return _with_rewards(render_answers(row, reader, names, answers), row, rewards)


def _with_rewards(paths: list[Rendered], row: Columns, rewards: list[Any]) -> list[Unencoded]:
    numbers = [_number(reward) for reward in rewards]
    return [(paths, partial(join_paths, {**row, "rewards": numbers}))]


def _number(reward: Any) -> float:
    # A comparison with nan is false.
    if isinstance(reward, bool | int | float) and abs(reward) <= LARGEST:
        return float(reward)
    raise RLHFError(f"the reward {shown(reward)} is not a number up to 1e18; correct it")


def _sample(sample: Any) -> Rendered:
    """Return a sample of trlX as one path."""
    if isinstance(sample, str):
        return render_text("", sample)
    if not isinstance(sample, list) or not all(isinstance(text, str) for text in sample):
        raise RLHFError("`sample` must be text or a list of texts: prompt, answer, prompt, ...")
    if not sample or len(sample) % 2:
        raise RLHFError(
            f"`sample` has {counted(len(sample), 'text')}; give an answer for each prompt"
        )
    bounds = list(pairwise(accumulate(map(len, sample), initial=0)))
    return Rendered("".join(sample), tuple(bounds[1::2]), bos=True, eos=True)
