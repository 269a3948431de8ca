"""The gateway to generation engines: which one a run uses, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.sections import Config, RolloutsConfig, TrainConfig
from rlhf.errors import RLHFError
from rlhf.registry.installed import find
from rlhf.request.reader import read_config
from rlhf.rollouts import find_engine, load_engine
from rlhf.train.samples import check_engine
from rlhf.trainer import Trainer

RECORD = "from rlhf.plugin import RolloutPlugin\nplugin = RolloutPlugin(engine='my_engine:Mine')\n"


class Writing:
    score = Trainer.score


class Scoring:
    def score(self, batch: Any) -> Any:
        return batch


def problem(act: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        act()
    return str(error.value)


def test_an_unknown_engine_is_refused_with_the_names_that_exist() -> None:
    words = ["--model", "demo:base", "--data", "demo:arithmetic", "--rollouts", "embeded"]
    assert problem(lambda: read_config("sft", overrides=words)) == (
        "rollouts 'embeded' is not installed (did you mean 'embedded'?); available: embedded "
        "(rlhf-rollouts 0.1.0)"
    )


def test_a_run_that_writes_nothing_needs_no_engine(install: Callable[..., Path]) -> None:
    writing: Any = Writing()
    scoring: Any = Scoring()
    check_engine(writing, Config())
    check_engine(scoring, Config(train=TrainConfig(samples=2)))


def test_samples_without_an_engine_name_the_package(install: Callable[..., Path]) -> None:
    writing: Any = Writing()
    config = Config(train=TrainConfig(samples=2))
    assert problem(lambda: check_engine(writing, config)) == (
        "train.samples: rollouts 'embedded' is not installed (run `pip install rlhf-rollouts`); "
        "available: none"
    )


def test_a_broken_engine_is_named_with_its_distribution(install: Callable[..., Path]) -> None:
    install("rlhf-mine", {"rollouts": {"mine": "my_engine:plugin"}}, {"my_engine": RECORD})
    config = Config(rollouts=RolloutsConfig(engine="mine"))
    assert str(find_engine(config)) == "rollouts 'mine' of rlhf-mine 1.0"
    assert problem(lambda: load_engine(find("rollouts", "mine"))) == (
        "rollouts 'mine' of rlhf-mine 1.0: no 'Mine' in my_engine; correct engine="
    )
    broken = f"{RECORD}\nclass Mine:\n    def generate(self): ...\n"
    install("rlhf-other", {"rollouts": {"other": "my_other:plugin"}}, {
        "my_other": broken.replace("my_engine", "my_other")
    })  # fmt: skip
    assert problem(lambda: load_engine(find("rollouts", "other"))) == (
        "rollouts 'other' of rlhf-other 1.0: my_other:Mine does not define sample"
    )
