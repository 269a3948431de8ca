"""The trainer by itself: which answers it compares, its terms, and what each is divided by."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.errors import RLHFError
from rlhf.trainer import Answer, Example
from rlhf_devkit import pack, weighted_loss
from rlhf_plugin_dpo import plugin
from rlhf_plugin_dpo.config import DPOConfig, LossEntry
from rlhf_plugin_dpo.trainer import DPOTrainer


def test_the_rate_and_beta_are_those_of_the_paper() -> None:
    assert plugin.defaults == {"optim.lr": 1e-6}
    assert (DPOConfig().beta, DPOConfig().names) == (0.1, ("sigmoid",))


class Pairs:
    """An engine over a vocabulary of ten: log-probability -log 10 for each token, with a slope."""

    def __call__(self, batch: Any, readout: Any) -> dict[str, torch.Tensor]:
        tokens = torch.full((len(batch.predict),), -math.log(10), requires_grad=True)
        sums = torch.zeros(len(batch.answer_example)).index_add(0, batch.answer, tokens)
        entropy = torch.full_like(tokens, math.log(10)).detach()
        return {"logprobs": sums, "tokens/logprobs": tokens, "tokens/entropy": entropy}


def trainer(*losses: LossEntry, **settings: Any) -> DPOTrainer:
    made = DPOTrainer(DPOConfig(loss=losses, **settings), tokenizer=None)
    made.policy = Pairs()
    return made


def row(prompt: int = 2, chosen: int = 2, rejected: int = 3, ranks: Any = (1.0, 2.0)) -> Any:
    answers = [Answer([5] * chosen), Answer([6] * rejected)]
    return SimpleNamespace(prompt=[1] * prompt, answers=answers, columns={"ranks": list(ranks)})


def test_each_term_is_divided_by_its_count() -> None:
    made = trainer(LossEntry(name="sigmoid"), LossEntry(name="sft", weight=0.5), reference="none")
    examples = [made.example(row(2, 2, 3)), made.example(row(0, 3, 2))]
    assert str(examples[1].values["chosen"]) == "[[nan, 1.0, 1.0], [nan, nan]]"
    loss = made.loss(pack(examples, [0, 1]))
    assert [(term.per, term.weight) for term in loss.terms] == [("examples", 1.0), ("labels", 0.5)]
    # Sums of log-probabilities: -2 and -3 times log 10; without a prompt -2 and -1 times.
    pairs = sum(math.log1p(math.exp(-0.1 * lead * math.log(10))) for lead in (1, -1))
    expected = pairs / 2 + 0.5 * math.log(10)
    total = weighted_loss(loss, {"examples": 2.0, "labels": 4.0})
    assert total.item() == pytest.approx(expected, abs=1e-6)
    margin, per = loss.metrics["rewards/margins"]
    assert (margin.item(), per) == (pytest.approx(0.0, abs=1e-6), "examples")
    assert loss.metrics["rewards/accuracies"][0].item() == 1.0
    assert loss.metrics["logps/chosen"][0].item() == pytest.approx(-4 * math.log(10))
    assert loss.metrics["nll_loss"][0].item() == pytest.approx(4 * math.log(10))


def test_losses_per_token_compare_means() -> None:
    made = trainer(LossEntry(name="simpo"), beta=2.0, gamma=0.5)
    loss = made.loss(pack([made.example(row(2, 2, 3))], [0]))
    assert loss.terms[0].sum.item() == pytest.approx(math.log1p(math.exp(0.5)), abs=1e-6)


def test_orpo_and_cpo_add_the_likelihood_of_their_papers() -> None:
    for name in ("orpo", "cpo"):
        loss = trainer(LossEntry(name=name)).loss(pack([row_example(name)], [0]))
        assert [term.per for term in loss.terms] == ["examples", "labels"]


def row_example(name: str) -> Example:
    return trainer(LossEntry(name=name)).example(row())


def test_a_user_loss_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def squared(chosen, rejected, config):\n"
    source += "    return (config.beta * (chosen - rejected)).square()\n"
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    made = trainer(LossEntry(name="my_losses:squared"), reference="none", beta=0.5)
    loss = made.loss(pack([made.example(row(2, 2, 3))], [0]))
    assert loss.terms[0].sum.item() == pytest.approx((0.5 * math.log(10)) ** 2, rel=1e-5)
    with pytest.raises(RLHFError, match="nowhere:there cannot be imported: ModuleNotFoundError"):
        trainer(LossEntry(name="nowhere:there"))


def test_the_better_answer_comes_first_in_any_order_of_answers() -> None:
    example = trainer(LossEntry(name="sigmoid")).example(row(ranks=(2.0, 1.0)))
    assert [list(answer.tokens) for answer in example.answers] == [[6, 6, 6], [5, 5]]


@pytest.mark.parametrize(
    ("ranks", "best", "worst"),
    [((2.0, 3.0, 1.0), 2, 1), ((1.0, 1.0, 4.0, 4.0), 0, 2), ((3.0, 2.0, 2.0), 1, 0)],
)
def test_of_many_answers_the_best_is_compared_with_the_worst_and_the_first_of_equals(
    ranks: Any, best: int, worst: int
) -> None:
    answers = [Answer([number]) for number in range(len(ranks))]
    ranked = SimpleNamespace(prompt=[1], answers=answers, columns={"ranks": list(ranks)})
    example = trainer(LossEntry(name="sigmoid")).example(ranked)
    assert [list(answer.tokens) for answer in example.answers] == [[best], [worst]]
    assert example.values == {"ignored_answers": len(ranks) - 2}
