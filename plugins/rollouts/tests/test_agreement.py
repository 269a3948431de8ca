"""Probabilities in sampling and in training."""

import math
from typing import Any

import numpy as np
import pytest

from rlhf.errors import RLHFError
from rlhf.trainer import Sample
from rlhf_rollouts.agreement import check_agreement
from rlhf_rollouts.written import sampled

DRAWN = [[-1.0, -2.0], [-0.5]]


def test_a_small_difference_is_noted() -> None:
    trained = [np.array([-1.25, -2.0]), np.array([-0.5], dtype=np.float32)]
    assert check_agreement(DRAWN, trained, bound=0.1, setting="grpo.agreement", step=0) == (
        "agreement  log-probabilities of 3 tokens differ by 8.3e-02 on average between sampling "
        "and training, at most by 2.5e-01"
    )


def test_thousands_of_tokens_are_written_with_commas() -> None:
    drawn = [[-1.0] * 4952]
    note = check_agreement(drawn, drawn, bound=0.1, setting="grpo.agreement", step=0)
    assert note.startswith("agreement  log-probabilities of 4,952 tokens differ by 0.0e+00 ")


def test_a_large_difference_is_refused_and_so_is_what_cannot_be_compared() -> None:
    trained = [np.array([-1.25, -2.0]), np.array([0.0])]
    with pytest.raises(RLHFError) as caught:
        check_agreement(DRAWN, trained, bound=0.05, setting="grpo.agreement", step=1)
    assert str(caught.value) == (
        "the log-probabilities of the 3 tokens of the rollout of step 2 differ by 0.25 on "
        "average between sampling and training, at most by 0.5, but grpo.agreement is 0.05: the "
        "engine may use another temperature, an adapter less, older weights or another precision; "
        "correct it, or raise grpo.agreement"
    )
    with pytest.raises(RLHFError, match="differ by nan on average"):
        check_agreement([[-1.0]], [[math.nan]], bound=0.05, setting="grpo.agreement", step=0)


def test_an_engine_without_probabilities_is_an_error() -> None:
    class Engineless:
        def sample(self, engine: Any, **how: Any) -> list[Sample]:
            return [Sample([3], [-1.0]), Sample([4, 5], [-1.0, math.nan])]

    run: Any = Engineless()
    with pytest.raises(RLHFError) as caught:
        sampled(run, run, prompts=[[1], [1]], seeds=[0, 1])
    assert str(caught.value) == (
        "the engine wrote tokens with the log-probability nan; check its weights and dtype"
    )
