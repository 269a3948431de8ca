"""The reference: the starting policy's own numbers in each mode, and a cache that is right or not
used."""

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.config.sections import (
    BatchConfig,
    Config,
    DataConfig,
    DataEntry,
    LoraConfig,
    ModelConfig,
    OptimConfig,
)
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example
from rlhf.data.packing import pack
from rlhf.data.tokenise import prepare
from rlhf.demo import rows, scratch
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.model.tokenizer import load_tokenizer
from rlhf.readouts import answer_logprobs, hidden_at, token_logprobs
from rlhf.reference import live as reference
from rlhf.reference import table
from rlhf.reference.digest import weights_digest
from rlhf.registry.gateway import build_gateways
from rlhf.request.reader import read_config
from rlhf.run.context import RunContext
from rlhf.run.introduction import curve_line
from rlhf.testing.plain import PlainBackend
from rlhf.trainer import Loss, Trainer


@attrs.frozen(kw_only=True)
class PairConfig(Config):
    """Core's sections as a trainer `pairs` has them."""

    trainer_name: ClassVar[str] = "pairs"
    backend_name: ClassVar[str] = "none"

    pairs: None = None


class Pairs(Trainer):
    """What makes trees of pairs, for data alone."""

    row_format = "preference"

    def example(self, row: Any) -> Example:
        return Example(row.prompt, row.answers)

    def setup(self, run: Any) -> None: ...

    def loss(self, batch: PackedBatch) -> Loss:
        return Loss(())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that would drop attention, and twelve pairs."""
    made = tmp_path_factory.mktemp("inputs")
    scratch.make(made / "model")
    config = LlamaConfig.from_pretrained(made / "model", attention_dropout=0.5)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, 2
    config.head_dim = 8
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(made / "model")
    pairs = rows("arithmetic", "train", "preference")[:12]
    (made / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log-probabilities of one test are no other test's."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_run(folder: Path, *, steps: int = 9, **sections: Any) -> RunContext:
    """A run over the twelve pairs whose policy is loaded and in training mode."""
    sections.setdefault("model", ModelConfig(path=str(folder / "model"), dtype="fp32"))
    config = PairConfig(
        data=DataConfig(train=(DataEntry(path=str(folder / "pairs.jsonl")),)),
        batch=BatchConfig(size=4, tokens=256),
        optim=OptimConfig(lr=1e-2, warmup=0.0),
        **sections,
    )
    tokenizer = load_tokenizer(config)
    examples = prepare(config, Pairs(None, tokenizer), tokenizer, which="train")
    hooks, _ = build_gateways(PlainBackend())
    longest = int(examples.longest_path.max())
    run = RunContext(
        config, tokenizer, Mesh(), hooks, steps=steps, longest=longest, examples=[examples]
    )
    run.load("policy", dropout=False).train()
    return run


def take_a_step(run: RunContext, batch: PackedBatch) -> None:
    """Move the policy's weights."""
    policy = run.roles["policy"].engine
    policy.backward(-policy(batch, token_logprobs)["logprobs"].mean() * 100, last=True)
    assert policy.step().moved


def packed(run: RunContext) -> PackedBatch:
    return pack(run.examples[0], [0, 5, 7])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


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


def test_the_policys_mode_and_what_it_trains_are_as_before(folder: Path) -> None:
    model = ModelConfig(path=str(folder / "model"), dtype="fp32", freeze=("*lora_A*",))
    run = make_run(folder, lora=LoraConfig(rank=2), model=model)
    module = run.roles["policy"].engine.module
    trained = {name: value.requires_grad for name, value in module.named_parameters()}
    assert 0 < sum(trained.values()) < len(trained)
    reference = run.reference("adapter")
    reference.token_logprobs(packed(run))
    assert module.training
    assert {name: value.requires_grad for name, value in module.named_parameters()} == trained


def test_any_readout_runs_on_an_engine(folder: Path) -> None:
    run = make_run(folder)
    reference = run.reference("engine")
    places = torch.tensor([3, 4])
    assert reference(packed(run), hidden_at(places))["hidden"].shape == (2, 32)


def test_the_cache_has_what_an_engine_gives_for_every_row(folder: Path) -> None:
    run = make_run(folder)
    engine, cached = run.reference("engine"), run.reference("cache")
    for numbers in ([0, 5, 7], [11], list(range(12))):
        batch = pack(run.examples[0], numbers)
        expected = engine.token_logprobs(batch)
        assert torch.allclose(cached.token_logprobs(batch), expected, atol=1e-5)
        assert torch.allclose(
            cached.answer_logprobs(batch), engine.answer_logprobs(batch), atol=1e-4
        )
        values = batch.values["reference_logprobs"]
        assert int((~values.isnan()).sum()) == len(batch.predict)


def test_the_cache_is_computed_once_and_found_by_the_next_run(folder: Path) -> None:
    first, second = make_run(folder), make_run(folder)
    first.reference("cache")
    second.reference("cache")
    assert "12 examples computed in" in first.notes[0]
    assert "as configured; found in" in second.notes[0]


def test_a_filler_has_nothing(folder: Path) -> None:
    run = make_run(folder)
    cached = run.reference("cache")
    assert cached.answer_logprobs(pack(run.examples[0], [])).shape == (0,)


def test_a_killed_run_keeps_its_parts_and_a_damaged_part_is_computed_again(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "PART", 5)
    whole = make_run(folder)
    expected = whole.reference("cache").token_logprobs(packed(whole))
    parts = sorted(cache.glob("reference/*/*/*.npy"))
    assert [path.name[:7] for path in parts] == ["000000-", "000001-", "000002-"]
    parts[0].unlink()
    parts[1].write_bytes(parts[1].read_bytes()[:-4] + b"\0\0\0\0")
    again = make_run(folder)
    found = again.reference("cache").token_logprobs(packed(again))
    assert "10 examples computed" in again.notes[0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert sorted(cache.glob("reference/*/*/*.npy")) == parts


def test_other_weights_another_precision_or_other_tokens_are_another_cache(
    folder: Path, tmp_path: Path
) -> None:
    run = make_run(folder)
    own = weights_digest(run.config)
    half = attrs.evolve(run.config, model=attrs.evolve(run.config.model, dtype="bf16"))
    assert weights_digest(half) != own
    products = attrs.evolve(run.config, model=attrs.evolve(run.config.model, fp8="rowwise"))
    assert weights_digest(products) != own
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    model.save_pretrained(tmp_path / "same")
    (tmp_path / "same" / "config.json").write_bytes((folder / "model/config.json").read_bytes())
    same = attrs.evolve(run.config.model, path=str(tmp_path / "same"))
    assert weights_digest(attrs.evolve(run.config, model=same)) == own
    model.model.norm.weight.data[0] += 1
    model.save_pretrained(tmp_path / "same")
    assert weights_digest(attrs.evolve(run.config, model=same)) != own
    file = run.examples[0].files[0]
    tokens = file._chunks[0]["tokens"][1].copy()
    digest = file.digest()
    tokens[3] += 1
    file._chunks[0]["tokens"] = (file._chunks[0]["tokens"][0], tokens)
    assert file.digest() != digest


def test_the_cache_knows_the_datas_own_answers_alone(folder: Path) -> None:
    run = make_run(folder)
    reference = run.reference("cache")
    expected = (
        "the reference's mode is cache, which only has log-probabilities of the data's own "
        "answers; choose adapter or engine"
    )
    with pytest.raises(RLHFError) as error:
        reference(packed(run), token_logprobs)
    assert str(error.value) == expected
    with pytest.raises(RLHFError) as error:
        reference.token_logprobs(attrs.evolve(packed(run), values={}))
    assert str(error.value) == expected


def test_auto_takes_the_cheapest_and_says_why(folder: Path) -> None:
    def note(run: RunContext, **options: Any) -> str:
        run.reference(**options)
        return run.notes[-1].partition(";")[0]

    assert note(make_run(folder, lora=LoraConfig(rank=2))) == (
        "reference  adapter: the policy with its adapter off, no second model"
    )
    assert note(make_run(folder)) == (
        "reference  cache: every row is trained on, so computed once for all, and no second model"
    )
    assert note(make_run(folder, steps=2)) == (
        "reference  engine: a second model, frozen: only 8 of 12 rows are trained on"
    )
    assert note(make_run(folder), live=True) == (
        "reference  engine: a second model, frozen: it runs on more than the data's own rows"
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
            "needs those of other answers; choose adapter or engine",
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
def test_a_mode_that_cannot_be_had_is_refused(
    folder: Path, settings: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    run = make_run(folder, **settings)
    with pytest.raises(RLHFError) as error:
        run.reference(**options)
    assert str(error.value) == text


def test_an_adapter_to_continue_is_part_of_the_start(folder: Path, tmp_path: Path) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2))
    take_a_step(run, packed(run))
    run.hooks.export_weights(engine=run.roles["policy"].engine, directory=tmp_path)
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
    follower.save(tmp_path)
    moved = weights(run.roles["reference"].engine)
    later = make_run(folder)
    later.reference("engine", every=1, mix=0.6)
    later.followers[0].load(tmp_path)
    found = weights(later.roles["reference"].engine)
    assert all(torch.equal(found[name], moved[name]) for name in moved)


def test_dropout_goes_from_modules_and_config_but_an_adapters_own_stays(folder: Path) -> None:
    run = make_run(folder, lora=LoraConfig(rank=2, dropout=0.3))
    module = run.roles["policy"].engine.module
    assert module.causal.config.attention_dropout == 0.0
    layer = module.causal.model.layers[0].self_attn
    assert layer.attention_dropout == 0.0
    assert layer.q_proj.lora_dropout["default"].p == 0.3
    assert curve_line(run) == [
        "curve      depends on ranks and batch.tokens: dropout 0.3 is sampled per micro-batch"
    ]
    assert curve_line(make_run(folder)) == []


def test_a_table_splits_by_answers(folder: Path) -> None:
    run = make_run(folder)
    run.reference("cache")
    example = run.examples[0][4]
    given = example.values["reference_logprobs"]
    assert [len(row) for row in given] == [len(answer.tokens) for answer in example.answers]
    assert all(row.dtype == np.float32 for row in given)


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
        (
            "kto --kto.reference cache",
            "kto.reference cache has log-probabilities of the rows' own answers only, and kto "
            "needs those of other answers; choose adapter or engine",
        ),
    ],
)
def test_a_reference_that_cannot_be_had_is_told_before_anything_loads(
    words: str, message: str
) -> None:
    name, *options = words.split()
    with pytest.raises(RLHFError) as error:
        read_config(name, overrides=["--model", "any", "--data", "any.jsonl", *options])
    assert str(error.value) == message
