"""The pair losses against numbers worked by hand from the papers' equations, and their limits."""

import math
from typing import Any

import pytest
import torch

from rlhf_plugin_dpo.config import KINDS, DPOConfig, LossEntry
from rlhf_plugin_dpo.losses import LOSSES, log_odds

WORKED: list[tuple[str, float, float, float, float | None, float, float, float]] = [
    # loss, chosen, rejected, beta, label_smoothing, value, slope in chosen, slope in rejected
    ("sigmoid", 0.6, -0.2, 0.5, None, 0.513015, -0.200656, 0.200656),
    ("sigmoid", 0.6, -0.2, 0.5, 0.1, 0.553015, -0.150656, 0.150656),
    ("sigmoid_norm", 0.6, -0.2, 0.5, 0.1, 0.553015, -0.150656, 0.150656),
    ("cpo", 0.6, -0.2, 0.5, None, 0.513015, -0.200656, 0.200656),
    ("robust", 0.6, -0.2, 0.5, 0.1, 0.463015, -0.263156, 0.263156),
    ("hinge", 0.6, -0.2, 0.5, None, 0.6, -0.5, 0.5),
    ("hinge", 6.0, -2.0, 0.5, None, 0.0, 0.0, 0.0),
    ("ipo", 0.6, -0.2, 0.5, None, 0.04, -0.4, 0.4),
    ("ipo_sum", 0.6, -0.2, 0.5, None, 0.04, -0.4, 0.4),
    ("exo_pair", 0.6, -0.2, 0.5, None, 2.099226, -0.781659, 0.781659),
    ("exo_pair", 0.6, -0.2, 0.5, 0.1, 0.313594, -0.215901, 0.215901),
    ("nca_pair", 0.6, -0.2, 0.5, None, 1.303731, -0.069168, 0.118755),
    ("bco_pair", 0.6, -0.2, 0.5, None, 1.198752, -0.212779, 0.237510),
    ("sppo_hard", 0.6, -0.2, 0.5, None, 0.8, -0.8, 1.6),
    ("apo_zero", 0.6, -0.2, 0.5, None, 0.900578, -0.122229, 0.124688),
    ("apo_down", 0.6, -0.2, 0.5, None, 0.975755, 0.002099, 0.120130),
    ("discopop", 0.06, -0.02, 0.5, None, 0.871675, 0.207450, -0.207450),
    ("simpo", -0.6, -0.8, 2.0, None, 0.744397, -1.049958, 1.049958),
    ("orpo", -0.6, -0.8, 0.1, None, 0.051332, -0.088985, 0.072910),
]


def config(name: str, **settings: Any) -> DPOConfig:
    return DPOConfig(loss=(LossEntry(name=name),), **settings)


@pytest.mark.parametrize(
    ("name", "chosen", "rejected", "beta", "smoothing", "value", "up", "down"), WORKED
)
def test_value_and_gradient_are_those_worked_by_hand(
    name: str,
    chosen: float,
    rejected: float,
    beta: float,
    smoothing: float | None,
    value: float,
    up: float,
    down: float,
) -> None:
    better = torch.tensor([chosen], dtype=torch.float64, requires_grad=True)
    worse = torch.tensor([rejected], dtype=torch.float64, requires_grad=True)
    settings = config(name, beta=beta, label_smoothing=smoothing)
    loss = LOSSES[name](better, worse, settings)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(value, abs=1e-6)
    slopes = torch.autograd.grad(loss.sum(), (better, worse))
    assert [slope.item() for slope in slopes] == pytest.approx([up, down], abs=1e-6)


def test_every_loss_is_worked() -> None:
    assert KINDS.keys() == LOSSES.keys() == {row[0] for row in WORKED}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sigmoid", math.log(2)),
        ("sigmoid_norm", math.log(2)),
        ("robust", math.log(2)),
        ("cpo", math.log(2)),
        ("nca_pair", 2 * math.log(2)),
        ("bco_pair", 2 * math.log(2)),
        ("hinge", 1.0),
        ("ipo", 25.0),
        ("sppo_hard", 50.0),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("discopop", (math.log(2) + 1) / 2),
    ],
)
def test_where_policy_and_reference_agree_the_loss_is_its_known_limit(
    name: str, value: float
) -> None:
    zero = torch.zeros(3)
    assert LOSSES[name](zero, zero, config(name)).tolist() == pytest.approx([value] * 3)


def test_robust_without_noise_is_dpo_and_undoes_conservative_smoothing() -> None:
    chosen, rejected = torch.tensor([0.3, -2.0]), torch.tensor([-1.0, 0.5])
    plain = LOSSES["sigmoid"](chosen, rejected, config("sigmoid"))
    assert torch.equal(LOSSES["robust"](chosen, rejected, config("robust")), plain)
    # Its mean over labels flipped with probability e is DPO's loss on the true labels.
    noisy = config("robust", label_smoothing=0.2)
    right = LOSSES["robust"](chosen, rejected, noisy)
    flipped = LOSSES["robust"](rejected, chosen, noisy)
    assert torch.allclose(0.8 * right + 0.2 * flipped, plain, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_far_away_pairs_give_finite_losses_and_gradients(name: str) -> None:
    per_token = KINDS[name].per_token and not KINDS[name].reference
    far = [-1e-30, -40.0] if per_token else [3000.0, -3000.0]
    chosen = torch.tensor(far, requires_grad=True)
    rejected = torch.tensor(far[::-1], requires_grad=True)
    loss = LOSSES[name](chosen, rejected, config(name)).sum()
    slopes = torch.autograd.grad(loss, (chosen, rejected))
    assert all(torch.isfinite(value).all() for value in (loss, *slopes))


def test_log_odds_of_a_half_are_zero_and_of_one_are_finite() -> None:
    odds = log_odds(torch.tensor([math.log(0.5), math.log(0.9), 0.0]))
    assert odds[:2].tolist() == pytest.approx([0.0, math.log(9)], abs=1e-6)
    assert torch.isfinite(odds[2])


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [(name, "beta", 0.3) for name in KINDS]
    + [
        (name, setting, 0.2)
        for name, kind in KINDS.items()
        for setting in kind.reads
        if setting != "beta"
    ],
)
def test_every_setting_that_a_loss_reads_changes_it(name: str, setting: str, value: float) -> None:
    chosen, rejected = torch.tensor([-0.5]), torch.tensor([-0.7])
    plain = LOSSES[name](chosen, rejected, config(name))
    assert not torch.isclose(
        plain, LOSSES[name](chosen, rejected, config(name, **{setting: value}))
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"loss": "sigmiod"},
            "unknown loss 'sigmiod' (did you mean sigmoid?); available: "
            + ", ".join(KINDS)
            + ", sft and module:function",
        ),
        ({"loss": ("ipo", "ipo")}, "duplicate loss 'ipo'; give it one weight"),
        (
            {"loss": "sft"},
            "sft is not a pair loss; add a pair loss, or use `rlhf run sft`",
        ),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing has no effect in hinge"),
        ({"gamma": 1.0}, "gamma has no effect in sigmoid"),
        ({"discopop_tau": 0.1}, "discopop_tau has no effect in sigmoid"),
        (
            {"loss": "exo_pair", "label_smoothing": 0.0},
            "exo_pair needs label_smoothing above 0; its default is 1e-3",
        ),
        (
            {"loss": "simpo", "reference": "cache"},
            "reference cache has no effect: simpo does not use a reference",
        ),
        ({"reference_mix": 1.0}, "reference_mix has no effect without reference_every"),
        (
            {"loss": "orpo", "reference_every": 8},
            "reference_every has no effect: orpo does not use a reference",
        ),
        (
            {"reference": "cache", "reference_every": 8},
            "reference_every needs reference engine, because cache cannot change",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(settings: dict[str, Any], text: str) -> None:
    names = settings.pop("loss", "sigmoid")
    entries = [LossEntry(name=name) for name in ([names] if isinstance(names, str) else names)]
    with pytest.raises(ValueError) as error:
        DPOConfig(loss=tuple(entries), **settings)
    assert str(error.value) == text


def test_a_weight_of_zero_only_removes_the_sft_term_of_a_loss() -> None:
    cpo = LossEntry(name="cpo")
    assert DPOConfig(loss=(cpo,)).sft_weight == 1.0
    assert DPOConfig(loss=(cpo, LossEntry(name="sft", weight=0.0))).sft_weight == 0.0
    assert DPOConfig().sft_weight == 0.0
    with pytest.raises(ValueError) as error:
        DPOConfig(loss=(cpo, LossEntry(name="hinge", weight=0.0)))
    assert str(error.value) == "hinge has the weight 0; remove it"
