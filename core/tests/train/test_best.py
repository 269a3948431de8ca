"""The best evaluation so far, without a run."""

import math

import pytest

from rlhf.errors import RLHFError
from rlhf.train.best import Best, objective


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("eval/loss", ("eval/loss", -1)),
        ("eval/rewards/accuracies", ("eval/rewards/accuracies", 1)),
        ("eval/first_error_accuracy", ("eval/first_error_accuracy", 1)),
        ("-eval/kl", ("eval/kl", -1)),
        ("+eval/loss", ("eval/loss", 1)),
    ],
)
def test_a_metric_falls_or_rises_by_its_sign_or_by_its_name(
    text: str, meaning: tuple[str, int]
) -> None:
    assert objective(text) == meaning


def test_only_a_strictly_better_number_is_better_and_nan_never_is() -> None:
    best = Best(metric="eval/loss", patience=2)
    better = [
        best.update(step, {"eval/loss": value}) for step, value in enumerate((3.0, 2.0, 2.0), 1)
    ]
    assert better == [True, True, False]
    assert not best.exhausted
    assert not best.update(4, {"eval/loss": math.nan})
    assert (best.step, best.value, best.exhausted) == (2, 2.0, True)
    assert str(best) == "eval/loss 2 at step 2"


def test_its_state_is_restored_unless_the_metric_has_changed() -> None:
    best = Best(metric="eval/loss")
    best.update(1, {"eval/loss": 3.0})
    again = Best(metric="eval/loss")
    again.load_state(best.state())
    assert again == best
    other = Best(metric="eval/accuracy")
    other.load_state(best.state())
    assert other.step is None


def test_an_unknown_metric_is_an_error_with_those_available() -> None:
    with pytest.raises(RLHFError) as error:
        Best(metric="eval/f1").update(1, {"eval/loss": 3.0, "loss": 1.0})
    assert str(error.value) == (
        "checkpoint.best: eval/f1 is not a metric of this run's evaluations; available: eval/loss"
    )
