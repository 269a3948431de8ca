"""The gateway to generation engines: which one a run uses, and what is refused."""

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from rlhf.config.sections import Config, RolloutsConfig, TrainConfig
from rlhf.errors import RLHFError
from rlhf.registry.installed import find
from rlhf.request.reader import read_config
from rlhf.request.settings_tree import to_tree
from rlhf.rollouts import exported_weights, find_engine, load_engine
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
        "(rlhf-rollouts 0.1.0), recorded (rlhf-rollouts 0.1.0), vllm (rlhf-rollout-vllm 0.1.0)"
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


SETTINGS = """
from attrs import frozen
from rlhf.plugin import RLHFError, RolloutPlugin

@frozen(kw_only=True)
class Settings:
    speed: int = 1

def check(config):
    if config.rollouts.mine.speed > 9:
        raise RLHFError(f"{config.model.path} is not that fast")

plugin = RolloutPlugin(engine="my_engine:Mine", config=Settings, check=check)
"""


def test_an_engine_has_settings_of_its_own(toy: Path, install: Callable[..., Path]) -> None:
    install("rlhf-mine", {"rollouts": {"mine": "my_settings:plugin"}}, {"my_settings": SETTINGS})
    words = ["--model", "tiny", "--data", "toys.jsonl", "--rollouts", "mine"]

    def read(*more: str) -> Any:
        return read_config("toy", overrides=[*words, *more]).config.rollouts

    assert (read().engine, read().mine.speed) == ("mine", 1)
    assert read("--rollouts.mine.speed", "3").mine.speed == 3
    found = read("--rollouts.mine.speed", "3")
    assert pickle.loads(pickle.dumps(found)) == found
    assert to_tree(found) == {
        "engine": "mine", "lag": 0, "keep": None, "replay": None, "mine": {"speed": 3},
    }  # fmt: skip
    assert problem(lambda: read("--rollouts.mine.sped", "3")) == (
        "rollouts.mine.sped: unknown setting; did you mean rollouts.mine.speed?"
    )
    assert problem(lambda: read("--rollouts.mine.speed", "10")) == "tiny is not that fast"
    assert read("--rollouts", "embedded").engine == "embedded"


TIED = LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = MixtralConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
)  # fmt: skip


@pytest.mark.parametrize("architecture", [TIED, EXPERTS], ids=["tied", "experts"])
@pytest.mark.parametrize("size", [1, 10**9])
def test_exported_weights_are_those_of_the_exported_folder(
    architecture: Any, size: int, tmp_path: Path
) -> None:
    module: Any = nn.Module()
    module.model = AutoModelForCausalLM.from_config(architecture)
    module.model.save_pretrained(tmp_path)
    state = module.state_dict()
    weights = SimpleNamespace(
        weights=lambda engine, buckets: ({name: state[name] for name in each} for each in buckets)
    )
    engine: Any = SimpleNamespace(module=module)
    found = [*exported_weights(engine, weights, size=size)]  # type: ignore[arg-type]
    assert (len(found) > 1) == (size == 1)
    merged = {name: value for bucket in found for name, value in bucket.items()}
    expected = load_file(tmp_path / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
