"""The reference: log-probabilities of the initial policy in each mode, and references that move."""

import gc
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from pair_runs import make_run, packed, take_a_step, weights, write_inputs

from rlhf.config.sections import (
    LoraConfig,
    ModelConfig,
)
from rlhf.data.batch import PackedBatch
from rlhf.errors import RLHFError
from rlhf.model.load import load_model
from rlhf.readouts import Head, answer_logprobs, hidden_at
from rlhf.reference import live as reference
from rlhf.request.reader import read_config
from rlhf.train import context
from rlhf.train.context import RunContext
from rlhf.train.exporting import whole_weights, write_weights
from rlhf.train.fragments import SavedEngine, fragments_to_write, write_fragments, write_plain
from rlhf.train.introduction import depends_on_layout
from rlhf.trainer import Average
from rlhf_distill import Mixture, distil
from rlhf_distill.distributions import forward_kl

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("mode", ["adapter", "engine"])
def test_the_policy_before_its_first_step_is_the_reference_to_the_last_bit(
    folder: Path, mode: Any
) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2) if mode == "adapter" else None)
    reference = run.reference(mode)
    batch = packed(run)
    start = run.roles["policy"].engine(batch, answer_logprobs)
    assert torch.equal(reference.answer_logprobs(batch), start["logprobs"])
    assert torch.equal(reference.token_logprobs(batch), start["tokens/logprobs"])
    assert not reference.answer_logprobs(batch).requires_grad
    take_a_step(run, batch)
    assert torch.equal(reference.answer_logprobs(batch), start["logprobs"])
    moved = run.roles["policy"].engine(batch, answer_logprobs)["logprobs"]
    assert not torch.allclose(moved, start["logprobs"], rtol=1e-3)


def test_the_reference_does_not_change_the_policys_mode_or_its_trained_parameters(
    folder: Path,
) -> None:
    model = ModelConfig(path=str(folder / "model"), dtype="fp32", freeze=("*lora_A*",))
    run = make_run(folder, lora=LoraConfig(rank=2), model=model)
    module = run.roles["policy"].engine.module
    trained = {name: value.requires_grad for name, value in module.named_parameters()}
    assert 0 < sum(trained.values()) < len(trained)
    reference = run.reference("adapter")
    reference.token_logprobs(packed(run))
    assert module.training
    assert {name: value.requires_grad for name, value in module.named_parameters()} == trained


def test_no_garbage_is_collected_while_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []

    def load(*rest: Any, **options: Any) -> Any:
        enabled.append(gc.isenabled())
        return load_model(*rest, **options)

    monkeypatch.setattr(context, "load_model", load)
    run = make_run(folder)
    run.reference("engine")
    assert enabled == [False, False]
    assert gc.isenabled()


def test_any_readout_runs_on_an_engine(folder: Path) -> None:
    run = make_run(folder)
    reference = run.reference("engine")
    places = torch.tensor([3, 4])
    assert reference(packed(run), hidden_at(places))["hidden"].shape == (2, 32)


@pytest.mark.parametrize("mode", ["adapter", "engine"])
def test_the_reference_is_the_teacher_of_a_divergence(folder: Path, mode: Any) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2) if mode == "adapter" else None)
    policy, reference = run.roles["policy"].engine, run.reference(mode, live=True)
    batch = packed(run)
    take_a_step(run, batch)
    weights = torch.linspace(-1.0, 2.0, len(batch.predict))
    mixture = Mixture(lambda student, teacher: (forward_kl(student, teacher), -teacher.exp()))
    read = distil(policy, reference, batch, mixture, weights=weights)
    known = reference(batch, all_logprobs)["logprobs"]
    expected = forward_kl(policy(batch, all_logprobs)["logprobs"], known)
    assert float(read["kl"].max()) > 1e-4
    torch.testing.assert_close(read["kl"], expected.detach(), rtol=1e-4, atol=1e-6)
    for found, wanted in zip(
        gradients(policy, read["loss"]), gradients(policy, expected @ weights), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)
    assert policy.module.training


def all_logprobs(hidden: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """The log-probabilities of the whole vocabulary at every prediction [N, V]."""
    return {"logprobs": head.logits(hidden[batch.predict_from]).log_softmax(-1)}


def gradients(engine: Any, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    trained = [item for item in engine.module.parameters() if item.requires_grad]
    return torch.autograd.grad(loss, trained)


def test_a_cache_is_no_teacher(folder: Path) -> None:
    run = make_run(folder)
    reference = run.reference("cache")
    mixture = Mixture(lambda student, teacher: (forward_kl(student, teacher), -teacher.exp()))
    with pytest.raises(RLHFError) as error:
        distil(run.roles["policy"].engine, reference, packed(run), mixture)
    assert str(error.value) == (
        "the reference's mode is cache, which only has log-probabilities of the data's own answers "
        "and of run.reference(survey=...); call run.reference(live=True)"
    )


def test_the_reference_has_the_first_values_of_the_trainers_own_parameters(folder: Path) -> None:
    for mode, lora in (("adapter", LoraConfig(rank=2)), ("engine", None)):
        run = make_run(folder, lora=lora, extra={"offset": torch.ones(2)})
        policy, reference = run.roles["policy"].engine, run.reference(mode)  # type: ignore[arg-type]
        with torch.no_grad():
            policy.module.extra["offset"] += 1
        assert reference(packed(run), offset)["offset"].tolist() == [1.0, 1.0]
        assert policy(packed(run), offset)["offset"].tolist() == [2.0, 2.0]


def offset(hidden: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    return {"offset": head.extra["offset"]}


def test_auto_chooses_the_cheapest_mode_and_prints_the_reason(folder: Path) -> None:
    def note(run: RunContext, **options: Any) -> str:
        run.reference(**options)
        return run.notes[-1].partition(";")[0]

    assert note(make_run(folder, lora=LoraConfig(rank=2))) == (
        "reference  adapter: the policy with its adapter off, no second model"
    )
    assert note(make_run(folder)) == (
        "reference  cache: every row is trained on, so it is computed once and needs no second "
        "model"
    )
    assert note(make_run(folder, steps=2)) == (
        "reference  engine: a second, frozen model, since only 8 of 12 rows are trained on"
    )
    assert note(make_run(folder), live=True) == (
        "reference  engine: a second, frozen model, since it runs on more than the data's own rows"
    )
    run = make_run(folder, steps=2)
    model = attrs.evolve(run.config.model, quantize="nf4")
    run.config = attrs.evolve(run.config, model=model)
    chosen, _ = reference.choose_mode(
        run.config, "auto", num_rows=12, steps=2, every=None, live=False
    )
    assert chosen == "cache"
    assert note(make_run(folder), every=3) == (
        "reference  engine: it moves towards the policy every 3 steps"
    )


@pytest.mark.parametrize(
    ("settings", "options", "text"),
    [
        (
            {},
            {"mode": "adapter"},
            "pairs.reference adapter needs lora; choose engine or cache, or add --lora 16",
        ),
        (
            {},
            {"mode": "cache", "live": True},
            "pairs.reference cache has log-probabilities of the rows' own answers only, and pairs "
            "needs more; choose adapter or engine",
        ),
        (
            {"lora": LoraConfig(rank=2)},
            {"every": 2},
            "pairs: a reference that moves follows all weights of the policy; remove the adapter",
        ),
        (
            {},
            {"mode": "cache", "every": 2},
            "pairs: a reference that moves cannot be of mode cache; choose engine",
        ),
    ],
)
def test_an_impossible_mode_is_refused(
    folder: Path, settings: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    run = make_run(folder, **settings)
    with pytest.raises(RLHFError) as error:
        run.reference(**options)
    assert str(error.value) == text


def test_an_adapter_to_continue_is_part_of_the_start(folder: Path, tmp_path: Path) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2))
    take_a_step(run, packed(run))
    engine = run.roles["policy"].engine
    write_weights(whole_weights(run.hooks, engine, keep=True), engine.module, tmp_path)
    model = attrs.evolve(run.config.model, adapter=str(tmp_path))
    later = make_run(folder, model=model)
    batch = packed(later)
    start = later.roles["policy"].engine(batch, answer_logprobs)["logprobs"]
    assert torch.equal(later.reference("engine").answer_logprobs(batch), start)
    with pytest.raises(RLHFError) as error:
        later.reference("adapter")
    assert str(error.value) == (
        f"pairs.reference adapter would be the base model without model.adapter {tmp_path}, "
        "which is not where the policy starts; choose engine or cache"
    )


def test_a_reference_that_moves_is_mixed_every_few_steps(folder: Path) -> None:
    run = make_run(folder)
    run.reference("engine", every=2, mix=0.25)
    (follower,) = run.followers
    before = weights(run.roles["reference"].engine)
    take_a_step(run, packed(run))
    follower.after_step(1)
    assert all(
        torch.equal(weights(run.roles["reference"].engine)[name], before[name]) for name in before
    )
    follower.after_step(2)
    policy, after = weights(run.roles["policy"].engine), weights(run.roles["reference"].engine)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    for name in before:
        expected = 0.25 * policy[name] + 0.75 * before[name]
        assert torch.allclose(after[name], expected, atol=1e-7), name


def test_a_reference_that_moved_is_saved_and_restored_to_the_last_bit(
    folder: Path, tmp_path: Path
) -> None:
    run = make_run(folder)
    run.reference("engine", every=1, mix=0.6)
    (follower,) = run.followers
    take_a_step(run, packed(run))
    follower.after_step(1)
    hooks, mesh, engine = run.hooks, run.mesh, follower.engine
    state = hooks.save_checkpoint(engine=engine)
    write_plain(engine, state, tmp_path)
    write_fragments(fragments_to_write(state, mesh), tmp_path, mesh.rank)
    moved = weights(run.roles["reference"].engine)
    later = make_run(folder)
    later.reference("engine", every=1, mix=0.6)
    saved = SavedEngine(tmp_path)
    later.hooks.load_checkpoint(engine=later.followers[0].engine, saved=saved)
    found = weights(later.roles["reference"].engine)
    assert all(torch.equal(found[name], moved[name]) for name in moved)


def test_an_average_follows_its_source_and_is_not_trained(folder: Path) -> None:
    first = torch.ones(3)
    slow = Average(first, of="fast", share=0.25, every=2)
    run = make_run(folder, extra={"fast": first, "slow": slow})
    (follower,) = run.followers
    extra = run.roles["policy"].engine.module.extra
    assert (extra["fast"].requires_grad, extra["slow"].requires_grad) == (True, False)
    extra["fast"].data.add_(2)
    follower.after_step(1)
    assert extra["slow"].tolist() == [1.0, 1.0, 1.0]
    follower.after_step(2)
    assert extra["slow"].tolist() == [1.5, 1.5, 1.5]
    assert extra["fast"].tolist() == [3.0, 3.0, 3.0]


def test_an_average_of_no_trained_parameter_or_of_another_shape_is_refused(folder: Path) -> None:
    slow = Average(torch.ones(3), of="fast", share=0.25, every=2)
    others: list[dict[str, Any]] = [{}, {"fast": torch.ones(2)}, {"fast": slow}]
    for other in others:
        with pytest.raises(RLHFError) as error:
            make_run(folder, extra={"slow": slow, **other})
        assert str(error.value) == (
            "run.load(): the average 'slow' is of 'fast', which is not a trained extra parameter "
            "of its shape; correct its name or shape"
        )
    with pytest.raises(ValueError, match=r"'share' must be <= 1: 1\.5"):
        Average(torch.ones(3), of="fast", share=1.5, every=2)
    with pytest.raises(ValueError, match="'every' must be >= 1: 0"):
        Average(torch.ones(3), of="fast", share=0.5, every=0)


def test_dropout_is_removed_except_that_of_the_adapter(folder: Path) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2, dropout=0.3))
    module = run.roles["policy"].engine.module
    assert module.causal.config.attention_dropout == 0.0
    layer = module.causal.model.layers[0].self_attn
    assert layer.attention_dropout == 0.0
    assert layer.q_proj.lora_dropout["default"].p == 0.3
    assert depends_on_layout(run) == (
        "depends on ranks and batch.tokens: dropout 0.3 is sampled per micro-batch"
    )
    assert depends_on_layout(make_run(folder)) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "dpo --dpo.reference adapter",
            "dpo.reference adapter needs lora; choose engine or cache, or add --lora 16",
        ),
        (
            "dpo --dpo.reference_every 5 --lora 4",
            "dpo: a reference that moves follows all weights of the policy; remove the adapter",
        ),
    ],
)
def test_an_impossible_reference_is_refused_before_anything_loads(words: str, message: str) -> None:
    name, *options = words.split()
    with pytest.raises(RLHFError) as error:
        read_config(name, overrides=["--model", "any", "--data", "any.jsonl", *options])
    assert str(error.value) == message


def test_a_run_reads_the_tokenizer_of_another_model(folder: Path, tmp_path: Path) -> None:
    run = make_run(folder)
    tokenizer = run.load_tokenizer(ModelConfig(path=str(folder / "model")))
    assert tokenizer.get_vocab() == run.tokenizer.get_vocab()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RLHFError) as caught:
        run.load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert str(caught.value).startswith(f"tokenizer: no tokenizer in {tmp_path} (")
