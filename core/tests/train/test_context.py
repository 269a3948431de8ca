"""What `Run` offers for other models: values on disk, their size, and a limit of the tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pair_runs import make_run, packed, write_inputs
from torch import Tensor

from rlhf.config.sections import ModelConfig
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Answer, Example
from rlhf.engine import Engine, Mesh
from rlhf.errors import RLHFError
from rlhf.readouts import Head, token_logprobs
from rlhf.train.context import RunContext

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def own(run: RunContext) -> ModelConfig:
    return run.config.model


def both(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    """Log-probability and entropy of each prediction [N, 2]."""
    found = engine(batch, token_logprobs)
    return torch.stack([found["logprobs"], found["entropy"]], dim=1)


def test_the_values_of_a_frozen_model_are_attached_to_every_example(folder: Path) -> None:
    run = make_run(folder)
    run.attach("judge", own(run), both, key="both", width=2)
    assert run.roles.keys() == {"policy"}
    batch = packed(run)
    values = batch.values["judge"]
    assert values.shape == (len(batch.tokens), 2)
    live = both(run.load("judge", model=own(run), trained=False), batch)
    torch.testing.assert_close(values[batch.predict_at], live, rtol=1e-5, atol=1e-5)
    assert int((~values.isnan()).sum()) == 2 * len(batch.predict)
    assert not values.requires_grad


def test_values_are_computed_once_for_a_key_and_a_limit_of_tokens(
    folder: Path, cache: Path
) -> None:
    def attach(key: str, limit: int | None = None) -> str:
        run = make_run(folder)
        if limit is not None:
            run.limit_tokens(limit)
        done = run.attach("judge", own(run), one, key=key)
        assert packed(run).values["judge"].ndim == 1
        return done.split(" in ")[0]

    assert [attach("a"), attach("a"), attach("b"), attach("a", 290), attach("a", 290)] == [
        "12 examples computed", "found", "12 examples computed", "12 examples computed", "found",
    ]  # fmt: skip
    names = sorted(path.name.partition("-")[2] for path in (cache / "judge").iterdir())
    assert names == ["a", "b", "first290-a"]


def one(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    return engine(batch, token_logprobs)["logprobs"]


def head_size(hidden: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    return {"size": torch.tensor(len(head.weight))}


def test_the_smallest_limit_of_tokens_holds_for_every_language_model(folder: Path) -> None:
    run = make_run(folder)
    batch, policy = packed(run), run.roles["policy"].engine
    whole = int(policy(batch, head_size)["size"])
    assert run.load_architecture().vocab_size == whole
    run.limit_tokens(whole - 3)
    run.limit_tokens(whole - 1)
    later = run.load("judge", model=own(run), trained=False)
    assert [int(engine(batch, head_size)["size"]) for engine in (policy, later)] == [whole - 3] * 2


def test_a_run_knows_the_size_of_its_models(folder: Path) -> None:
    run = make_run(folder)
    parameters = run.roles["policy"].engine.module.parameters()
    assert run.shape("policy").parameters == sum(item.numel() for item in parameters)


def test_an_error_about_an_architecture_names_the_role(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RLHFError) as error:
        make_run(folder).load_architecture("judge", model=ModelConfig(path=str(tmp_path)))
    assert str(error.value) == (
        f"judge: ModelConfig.path {tmp_path} is an adapter; merge it first with rlhf merge"
    )


@pytest.mark.parametrize("per", ["prediction", "answer"])
def test_a_tree_that_is_larger_than_the_budget_is_read_in_parts(per: str) -> None:
    sizes: list[int] = []

    def compute(batch: PackedBatch) -> Tensor:
        sizes.append(len(batch.tokens))
        tokens = batch.tokens[batch.predict_at].float()
        if per == "prediction":
            return tokens
        return torch.zeros(batch.num_answers).index_add(0, batch.answer, tokens)

    answers = [Answer([2, 3]), Answer([4, 5, 6]), Answer([7])]
    found = {}
    for budget in (64, 6):
        run = SimpleNamespace(
            config=SimpleNamespace(batch=SimpleNamespace(budget=budget)), roles={}, mesh=Mesh()
        )
        trees = [Example([1, 1], answers), Example([1], answers[:1])]
        read: Any = RunContext.read
        found[budget] = read(run, trees, compute, per=per)
    assert [len(tree) for tree in found[6]] == [3, 1]
    for whole, parts in zip(found[64], found[6], strict=True):
        for value, same in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(value, same)
    assert sizes[0] == 11
    assert max(sizes[1:]) <= 6
