"""What a run chooses so that a step fits its accelerator and keeps it busy."""

from typing import Any

import attrs
import pytest
import torch
from fits import fit_of, on_accelerator, peak_with, small_run

from rlhf.data.example import Answer, Example, num_tokens
from rlhf.data.order import ROUND_ON_ACCELERATOR
from rlhf.engine import GIB, Mesh, gib
from rlhf.memory import choice
from rlhf.memory.choice import AMPLE, Choice, choose
from rlhf.memory.fit import MARGIN, SCAN, StepFit
from rlhf.memory.rehearsal import STRICT
from rlhf.request.reader import read_config
from rlhf.train.dataset import Dataset, prepare_data
from rlhf.train.set_up import out_of_memory, step_fit
from rlhf_devkit import tiny
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return small_run(tmp_path_factory.mktemp("choice"))


@pytest.fixture(scope="module")
def small(words: list[str]) -> list[str]:
    return [*words, "--batch.tokens", "150"]


def chosen(fit: StepFit) -> tuple[Choice, str]:
    return choose(fit, any_tokens=True)


def test_tokens_at_once_are_doubled_while_fewer_micro_batches_fit(small: list[str]) -> None:
    fit = on_accelerator(small, GIB)
    step = int(fit.examples[0].lengths.sum()) // 3  # 4 of 12 rows alike.
    assert 300 < step <= 600
    many = -(-step // 150)
    why = f"instead of {many} (smaller ones leave the device waiting for the host)"
    assert chosen(fit) == (
        Choice(600, "auto"),
        f"tokens     600 per micro-batch: about 1 micro-batch per step {why}",
    )
    tight = int(fit.estimate.peak_with(300) / AMPLE) + 1000
    assert chosen(on_accelerator(small, tight)) == (
        Choice(300, "auto"),
        f"tokens     300 per micro-batch: about 2 micro-batches per step {why}",
    )
    full = int(fit.peak / MARGIN) + 1
    assert chosen(on_accelerator(small, full)) == (Choice(150, "auto"), "")


def test_a_configured_number_of_tokens_is_kept(small: list[str]) -> None:
    fit = on_accelerator(small, GIB)
    assert choose(fit, any_tokens=False) == (Choice(150, "auto"), "")


def test_where_a_step_is_one_micro_batch_more_tokens_are_not_taken(words: list[str]) -> None:
    assert chosen(on_accelerator(words, GIB)) == (Choice(8192, "auto"), "")


def test_where_a_layer_keeps_the_device_busy_more_tokens_are_not_taken(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = on_accelerator(small, GIB)
    monkeypatch.setattr(choice, "ENOUGH", 299 * fit.rehearsed.policy.shape.mean_layer)
    picked, _ = chosen(fit)
    assert picked.tokens == 300


def test_layers_with_scans_keep_the_host_busy_for_longer(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = on_accelerator(small, GIB)
    policy = fit.rehearsed.policy
    monkeypatch.setattr(choice, "ENOUGH", 299 * policy.shape.mean_layer)
    scans = attrs.evolve(policy.shape, scans=policy.shape.layers)
    object.__setattr__(policy, "shape", scans)
    assert fit.layer == pytest.approx(scans.mean_layer / SCAN, rel=1e-2)
    picked, _ = chosen(fit)
    assert picked.tokens == 600


def test_a_mixture_whose_gradients_are_large_has_more_tokens(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = on_accelerator(small, GIB)
    shape = fit.rehearsed.policy.shape
    monkeypatch.setattr(choice, "ENOUGH", 299 * shape.mean_layer)
    # Three of four parameters of a layer are those of idle experts.
    idle = 3 * shape.layers * shape.mean_layer
    mixture = attrs.evolve(shape, parameters=shape.parameters + idle, idle=idle)
    object.__setattr__(fit.rehearsed.policy, "shape", mixture)
    assert chosen(fit)[0].tokens == 300
    monkeypatch.setattr("rlhf.memory.fit.ADDED", mixture.mean_layer)
    assert chosen(fit)[0].tokens == 600


def test_products_in_fp8_which_depend_on_them_have_no_more_tokens(small: list[str]) -> None:
    fit = on_accelerator(small, GIB)
    fit.rehearsed  # noqa: B018  Known before, since FP8 needs its library.
    model = attrs.evolve(fit.config.model, fp8="tensorwise")
    object.__setattr__(fit, "config", attrs.evolve(fit.config, model=model))
    assert chosen(fit) == (Choice(150, "auto"), "")


def test_more_tokens_with_which_the_model_fails_are_not_taken(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STRICT, raising=False)
    fit = on_accelerator(small, GIB)

    class Narrow(type(fit.trainer)):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            if batch.tokens.numel() > 300:
                raise RuntimeError("too long")
            return super().loss(batch)

    narrow = attrs.evolve(fit, trainer=Narrow(fit.trainer.config, fit.trainer.tokenizer))
    picked, _ = chosen(narrow)
    assert picked.tokens == 300


def test_the_cheapest_recomputation_with_which_a_step_fits_is_taken(words: list[str]) -> None:
    whole, some, least = (peak_with(level, words) for level in ("none", "selective", "full"))
    assert least < some < whole
    # 95 % of the memory is a step's.
    memory = int(some / MARGIN) + 1
    assert chosen(on_accelerator(words, memory)) == (
        Choice(8192, "selective"),
        "recompute  selective: with the products of gated layers computed again in backward a step "
        f"takes {gib(some)} of {gib(memory)} GiB, instead of {gib(whole)}",
    )
    memory = int(least / MARGIN) + 1
    assert choose(on_accelerator(words, memory), any_tokens=False) == (
        Choice(8192, "full"),
        "recompute  full: with every layer computed again in backward a step takes "
        f"{gib(least)} of {gib(memory)} GiB, instead of {gib(whole)}",
    )


def test_fewer_tokens_are_preferred_to_recomputation_while_the_device_is_busy(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "LEAST_TOKENS", 1)
    given = [*words, "--batch.tokens", "400"]
    half = on_accelerator([*words, "--batch.tokens", "200"], GIB).peak
    assert half < peak_with("selective", given)
    memory = int(half / MARGIN) + 1
    fit = on_accelerator(given, memory)
    picked, _ = chosen(fit)
    assert picked == Choice(400, "full")
    monkeypatch.setattr(choice, "ENOUGH", 199 * fit.rehearsed.policy.shape.mean_layer)
    picked, line = chosen(fit)
    assert picked == Choice(200, "auto")
    assert line == (
        f"tokens     200: with 200 tokens per micro-batch a step takes {gib(half)} of "
        f"{gib(memory)} GiB, instead of {gib(fit.peak)}"
    )


def test_if_recomputation_does_not_suffice_tokens_are_reduced_too(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "LEAST_TOKENS", 1)
    fit = on_accelerator([*words, "--batch.tokens", "400"], 1000)
    largest = fit.largest
    picked, line = chosen(fit)
    assert picked.recompute == "full"
    assert largest <= picked.tokens < 2 * largest
    assert line.startswith(
        f"recompute  full, {picked.tokens} tokens per micro-batch: with every layer computed again "
        f"in backward and {picked.tokens} tokens per micro-batch a step takes "
    )


@pytest.mark.parametrize("given", ["none", "selective", "full"])
def test_a_configured_recomputation_is_kept(given: str, words: list[str]) -> None:
    fit = on_accelerator([*words, "--model.recompute", given], 1000)
    assert choose(fit, any_tokens=False) == (Choice(8192, given), "")


def test_on_the_cpu_and_with_unknown_memory_nothing_is_changed(words: list[str]) -> None:
    assert chosen(fit_of(words, 1000)) == (Choice(8192, "auto"), "")
    assert chosen(on_accelerator(words, 0)) == (Choice(8192, "auto"), "")


def test_a_choice_is_of_the_run(words: list[str]) -> None:
    fit = fit_of(words, GIB).under(*Choice(300, "full"))
    assert fit.config.batch.budget == 300
    assert fit.config.model.recompute == "full"


def test_advice_never_names_a_choice_that_did_not_suffice(words: list[str]) -> None:
    least = peak_with("full", words)
    request = read_config("sft", overrides=words)
    fit = on_accelerator(words, least)
    cause = torch.OutOfMemoryError("no more")
    message = str(out_of_memory(request.config, prepare_data(request), fit.mesh, fit.hooks, cause))
    assert f"a step was estimated at {gib(least)} GiB: " in message
    assert "model.recompute" not in message


def settled(words: list[str], trainer: Any = None) -> int:
    request = read_config("sft", overrides=words)
    data = prepare_data(request)
    data = attrs.evolve(data, trainer=trainer(data)) if trainer else data
    return data.with_token_budget(request.config).batch.budget


def test_tokens_at_once_hold_the_largest_example(words: list[str], tmp_path: Any) -> None:
    assert settled(words) == 8192
    rows = [{"prompt": "one", "completion": " two" * 9000}]
    more = ["--data", str(tiny.write_rows(tmp_path / "rows.jsonl", rows))]
    picked = settled([*words, *more, "--data.max_tokens", "100000"])
    assert 9000 < picked < 100_000
    assert settled([*words, *more, "--data.max_tokens", "100000", "--batch.tokens", "99000"]) == (
        99_000
    )


def rolling(data: Dataset) -> Any:
    class Rolling(type(data.trainer)):  # type: ignore[misc]
        def rollout(self, examples: Any, step: int, seeds: Any) -> Any:
            return examples

    return Rolling(data.trainer.config, data.trainer.tokenizer)


def rolling_fit(words: list[str], memory: int) -> StepFit:
    """The fit of an on-policy run on an accelerator."""
    request = read_config("sft", overrides=words)
    data = prepare_data(request)
    data = attrs.evolve(data, trainer=rolling(data))
    mesh = Mesh(device=torch.device("cuda", 0), memory=memory)
    return step_fit(request.config, data, mesh, build_gateways(PlainBackend())[0])


def test_auto_tokens_hold_the_answers_of_a_rollout(words: list[str]) -> None:
    assert settled([*words, "--data.max_tokens", "9000"], rolling) == 9000
    assert settled([*words, "--data.max_tokens", "9000"]) == 8192


def test_fewer_tokens_hold_the_answers_of_a_rollout_too(words: list[str]) -> None:
    fit = rolling_fit([*words, "--data.max_tokens", "3000"], 1000)
    assert (fit.longest, fit.largest) == (3000, 3000)
    assert int(fit.examples[0].lengths.max()) < 150
    choices = choice.smaller(fit, Choice(8192, "auto"), any_tokens=True)
    assert {each.tokens for each in choices} == {8192, 4096}


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "accumulates"), [("3000", 8192, True), ("150", 4 * 150, False)]
)
def test_the_estimate_of_an_on_policy_run_has_full_micro_batches(
    max_tokens: str, tokens: int, accumulates: bool, words: list[str]
) -> None:
    fit = rolling_fit([*words, "--data.max_tokens", max_tokens], GIB)
    assert tokens - 150 < fit.rehearsed.tokens < tokens + ROUND_ON_ACCELERATOR
    assert fit.rehearsed.most.accumulates == accumulates


def test_whole_trees_of_a_rollout_fit_in_its_micro_batches(words: list[str]) -> None:
    fit = rolling_fit([*words, "--data.max_tokens", "1000", "--batch.tokens", "2000"], 64 * GIB)

    def tree(examples: Any, most: int) -> Example:
        return Example([0] * 100, [Answer([0] * (most - 100), [True] * (most - 100))] * 4)

    fit.trainer.rollout_shape = tree  # type: ignore[method-assign]
    assert num_tokens(tree(None, 1000)) == 3700
    picked, why = chosen(fit)
    assert picked.tokens == 4 * 3700
    assert "about 1 micro-batch per step instead of 8" in why


def test_a_step_of_a_rollout_is_counted_with_its_answers(words: list[str]) -> None:
    rows = rolling_fit([*words, "--data.max_tokens", "1000", "--batch.tokens", "1000"], 64 * GIB)
    assert rows.examples[0].lengths.mean() * 4 < 1000
    picked, why = chosen(rows)
    assert picked.tokens == 4000
    assert "about 1 micro-batch per step instead of 4" in why
