"""The door for on-policy methods: what a trainer makes of a step is laid out, counted and packed,
and sampling draws from the model's own distribution."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.data.example import Answer, Example
from rlhf.data.order import RunOrder, StepPlan
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.loop.rollout import roll_out
from rlhf.rank.generate import Noise, grouped


class Rows(list[Example]):
    """Examples with names."""

    def name(self, number: int) -> str:
        return f"rows.jsonl line {number + 1}"


class Doubling:
    """Answers twice as long, whose second half is not trained on, with a value per token."""

    def rollout(self, examples: Sequence[Example], step: int) -> list[Example]:
        assert step == 5
        return [self.made(example) for example in examples]

    def made(self, example: Example) -> Example:
        tokens = list(example.answers[0].tokens)
        trained = [True] * len(tokens) + [False] * len(tokens)
        values = [[float("nan")] * len(tokens) + [1.0] * len(tokens)]
        return Example(example.prompt, [Answer(tokens * 2, trained)], {"mark": values})


def order(rank: int, *, tokens: int = 16) -> RunOrder:
    rows = Rows(Example([9], [Answer([number + 1] * (number + 1))]) for number in range(4))
    given: Any = rows
    return RunOrder(examples=given, size=3, tokens=tokens, rank=rank, ranks=2)


def plan() -> StepPlan:
    nothing = np.zeros(0, np.int64)
    return StepPlan(
        step=5, epoch=0, epoch_done=0.5, rows=np.array([3, 0, 2]), lengths=nothing, paths=nothing,
        answers=nothing,
        totals={}, layout=[], micro=[],
    )  # fmt: skip


def rolled(rank: int, **options: int) -> Any:
    trainer: Any = Doubling()
    return roll_out(trainer, order(rank, **options), plan(), Mesh())


def test_new_examples_are_laid_out_and_packed() -> None:
    shares = [rolled(rank) for rank in range(2)]
    for replaced, batches in shares:
        assert replaced.lengths.tolist() == [9, 3, 7]
        assert replaced.rows.tolist() == [3, 0, 2]
        assert [batch.rows for batch in batches] == [tuple(rows) for rows in replaced.micro]
        assert all(len(batch.tokens) <= 16 for batch in batches)
    seen = sorted(row for _, batches in shares for batch in batches for row in batch.rows)
    assert seen == [0, 2, 3]
    first = next(batch for batch in shares[0][1] + shares[1][1] if 2 in batch.rows)
    assert 3 in first.tokens


def test_totals_are_counted_from_the_new_examples() -> None:
    counts = [rolled(rank)[0].totals for rank in range(2)]
    both = {name: counts[0][name] + counts[1][name] for name in counts[0]}
    assert both == {"examples": 3.0, "answers": 3.0, "tokens": 8.0, "labels": 8.0}


def test_an_answer_beyond_the_budget_is_an_error_with_its_row() -> None:
    with pytest.raises(RLHFError) as error:
        rolled(0, tokens=8)
    assert str(error.value) == (
        "step 6: with its new answer rows.jsonl line 4 has 9 tokens but batch.tokens is 8; set "
        "batch.tokens to at least 9, or generate fewer tokens"
    )


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    count, temperature = 4000, 2.0
    logits = torch.tensor([0.0, 1.0, 3.0])
    noise = Noise(range(count), temperature, torch.device("cpu"))
    drawn = noise(torch.empty(0), logits.repeat(count, 1)).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / count
    torch.testing.assert_close(shares, (logits / temperature).softmax(-1), atol=0.03, rtol=0)


def test_a_sample_depends_only_on_its_seed() -> None:
    scores = torch.zeros(3, 50)
    together = Noise([7, 8, 9], 1.0, torch.device("cpu"))
    single = Noise([9], 1.0, torch.device("cpu"))
    for _ in range(3):
        assert torch.equal(together(scores, scores)[2:], single(scores[:1], scores[:1]))


def test_prompts_of_like_length_run_together_within_the_budget() -> None:
    assert grouped([3, 9, 4, 8], max_new_tokens=2, tokens=22) == [[1, 3], [2, 0]]
    assert grouped([50, 1], max_new_tokens=2, tokens=22) == [[0], [1]]
    assert grouped([], max_new_tokens=2, tokens=22) == []
