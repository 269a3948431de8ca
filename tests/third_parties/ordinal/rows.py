"""The row format `rated`: `{"text", "reply", "rating"}`, where the reply is rated."""

import random
from functools import partial
from typing import Any

from rlhf.errors import RLHFError
from rlhf_demo import Problem
from rlhf_rows import (
    Columns,
    Reader,
    Unencoded,
    has,
    join_paths,
    missing_columns,
    render_text,
    row_format,
)


@row_format
def rated(row: Columns, reader: Reader) -> list[Unencoded]:
    if not has(row, "text", "reply", "rating"):
        raise missing_columns(row, "`text`, `reply` and `rating`")
    rating, levels = row["rating"], reader.section.levels
    if rating not in range(1, levels + 1):
        raise RLHFError(f"`rating` must be an integer from 1 to {levels}, got {rating}")
    return [([render_text(row["text"], row["reply"])], partial(join_paths, row))]


def demo(problem: Problem, draw: random.Random) -> dict[str, Any]:
    rating = draw.randint(1, 5)
    reply = str(problem.answer + 5 - rating)
    return {"text": problem.question, "reply": reply, "rating": rating}
