"""Kahneman-Tversky optimisation against what every trainer has to prove."""

import pytest

from rlhf_devkit import TrainerConformance


class TestKTO(TrainerConformance):
    trainer = "kto"
    # Where little is pushed down the divergence is above zero, so that it is a part of every proof.
    words = ("--kto.undesirable_weight", "0.1")
    others = {  # noqa: RUF012
        "beta": 0.5,
        "loss": "apo_zero_unpaired",
        "desirable_weight": 2.0,
        "undesirable_weight": 0.5,
    }
    without_effect = {  # noqa: RUF012
        "reference": "adapter, engine and cache are three ways to the same numbers"
    }

    marks_of_other_layouts = (pytest.mark.matrix,)


@pytest.mark.matrix
class TestKTOWithNewPairsInEveryEpoch(TestKTO):
    """The reference of the runs above is cached, and with it the pairs."""

    words = (*TestKTO.words, "--kto.reference", "engine")
