"""The probe's ladder: what it finds out, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from attrs import evolve
from engines import BareEngine, Shards
from small_models import SIZES, write_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Phi3Config,
)

from rlhf import sharding
from rlhf.config.sections import Config, LoraConfig, ModelConfig
from rlhf.engine import Mesh, register_sharding
from rlhf.errors import RLHFError
from rlhf.model import probe
from rlhf.model.finite import check_finite
from rlhf.model.packed import PackedModel
from rlhf.model.probe import AttentionPath, choose_path, probe_batch
from rlhf.train.context import RunContext, probed_alike
from rlhf_devkit import tiny
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend


def engine_of(causal: Any, precision: str = "fp32") -> Any:
    return BareEngine(PackedModel(causal), precision)


def seeded(make: Any, *args: Any) -> Any:
    torch.manual_seed(0)
    return make(*args)


class DropsItsMask(LlamaForCausalLM):
    """A Llama that rebuilds its mask, as a model with a pattern of its own might."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner = self.model.forward

        def forward(
            *args: Any, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
        ) -> Any:
            mask = None if attention_mask is None else attention_mask | attention_mask
            return inner(*args, attention_mask=mask, position_ids=position_ids, **kwargs)

        self.model.forward = forward  # type: ignore[method-assign]


class AsksItsMask(LlamaForCausalLM):
    """A Llama whose layers take their mask for a tensor."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: (
                kwargs["attention_mask"].shape and None
                if kwargs["attention_mask"] is not None
                else None
            ),
            with_kwargs=True,
        )


@pytest.mark.parametrize("allowed", [True, False])
def test_the_probe_runs_without_cudnns_attention(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the setting as it was."""
    seen: list[bool] = []
    engine = BareEngine(PackedModel(LlamaForCausalLM(LlamaConfig(**SIZES))))
    own = engine.module.forward

    def forward(*given: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(*given)

    monkeypatch.setattr(engine.module, "forward", forward)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        choose_path(engine, Mesh(device=torch.device("cpu")))
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert seen
    assert not any(seen)


def test_the_probe_detects_a_model_that_ignores_the_tree() -> None:
    choice = choose_path(
        engine_of(seeded(DropsItsMask, LlamaConfig(**SIZES, pad_token_id=0))), Mesh()
    )
    assert choice.path == "padded"
    assert choice.reason.startswith("packed was off by ")


def test_a_model_that_cannot_run_with_the_tree_is_reported_by_its_error() -> None:
    choice = choose_path(
        engine_of(seeded(AsksItsMask, LlamaConfig(**SIZES, pad_token_id=0))), Mesh()
    )
    assert str(choice) == (
        "padded rows with the model's own attention (packed failed with AttributeError: "
        "'TreeMask' object has no attribute 'shape')"
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("config_class", [LlamaConfig, MixtralConfig])
def test_rounding_to_16_bits_is_not_taken_for_an_error(precision: str, config_class: Any) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    causal = seeded(AutoModelForCausalLM.from_config, config_class(**SIZES, pad_token_id=0)).to(
        dtype
    )
    assert choose_path(engine_of(causal, precision), Mesh()).path == "tree"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_probe_detects_a_wrong_mask_in_16_bits_too(precision: str) -> None:
    causal = seeded(DropsItsMask, LlamaConfig(**SIZES, pad_token_id=0))
    causal = causal.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    assert choose_path(engine_of(causal, precision), Mesh()).path == "padded"


def phi3_with_longrope() -> Any:
    half = 32 // 2 // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * half,
        "long_factor": [3.0] * half,
    }
    return Phi3Config(
        **SIZES,
        pad_token_id=0,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=rope,
    )


def test_positions_that_depend_on_the_longest_row_run_one_path_at_a_time() -> None:
    causal = seeded(AutoModelForCausalLM.from_config, phi3_with_longrope())
    assert str(choose_path(engine_of(causal), Mesh(), longest=100)) == (
        "one path at a time with the model's own attention (its longrope positions depend on the "
        "longest row beyond 64 tokens)"
    )
    assert choose_path(engine_of(causal), Mesh(), longest=60).path == "tree"


def test_a_model_that_fails_on_plain_text_is_refused_in_one_line() -> None:
    causal = seeded(AutoModelForCausalLM.from_config, LlamaConfig(**SIZES, pad_token_id=0))
    causal.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 3)
    with pytest.raises(RLHFError) as caught:
        choose_path(engine_of(causal), Mesh())
    assert str(caught.value) == (
        "LlamaForCausalLM fails on plain text in fp32 with RuntimeError: mat1 and mat2 shapes "
        "cannot be multiplied (40x48 and 3x3); choose another model.path"
    )


def test_a_head_that_is_not_the_models_is_refused() -> None:
    causal = seeded(AutoModelForCausalLM.from_config, LlamaConfig(**SIZES, pad_token_id=0))
    causal.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].tanh(),))
    with pytest.raises(RLHFError) as caught:
        choose_path(engine_of(causal), Mesh())
    assert re.sub(r"\(off by .*?\)", "(off)", str(caught.value)) == (
        "the logits of LlamaForCausalLM are not its head's weight, bias, scale and soft cap "
        "applied to the last hidden states (off), so this family cannot be trained; choose another "
        "model.path"
    )


def test_the_probe_reaches_beyond_the_window_but_not_beyond_the_longest_path() -> None:
    config = LlamaConfig(**SIZES, pad_token_id=0)
    config.sliding_window = 700
    engine = engine_of(seeded(AutoModelForCausalLM.from_config, config))
    assert probe_batch(engine, 8192).spans[0] == (700, (24, 17))
    assert probe_batch(engine, 100).spans[0] == (76, (24, 17))
    assert len(probe_batch(engine, 100).tokens) % 128 == 0


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles whose models were probed; each one's path is `packed`."""
    roles = []

    def first_correct(engine: Any, *arguments: Any) -> AttentionPath:
        roles.append(engine.role)
        return AttentionPath(path="packed", reason="tree was off by 0.3")

    monkeypatch.setattr(probe, "first_correct", first_correct)
    return roles


def run_with_policy(model: ModelConfig, **sections: Any) -> RunContext:
    config = Config(model=model, **sections)
    hooks, _ = build_gateways(PlainBackend())
    run = RunContext(config=config, tokenizer=None, mesh=Mesh(), hooks=hooks, steps=1, longest=8)
    run.load("policy")
    return run


def test_the_probe_runs_once_for_models_that_differ_only_in_their_weights(
    tmp_path: Path, probed: list[str]
) -> None:
    for name, options in {"first": {}, "second": {}, "third": {"rms_norm_eps": 1e-3}}.items():
        write_model(tmp_path / name, LlamaConfig(**SIZES, **options))
    own = ModelConfig(path=str(tmp_path / "first"), dtype="fp32")
    run = run_with_policy(own)
    second = evolve(own, path=str(tmp_path / "second"), init="random")
    alike = run.load("alike", model=second, trained=False)
    run.load("other", model=evolve(own, path=str(tmp_path / "third")), trained=False)
    run.load("scores", model=own, trained=False, task="sequence")
    run.load("judge", model=own, trained=False, task="sequence")
    run.load("bf16", model=evolve(own, dtype="bf16"), trained=False)
    assert probed == ["policy", "other", "scores", "bf16"]
    assert {role.attention for role in run.roles.values()} == {run.roles["policy"].attention}
    assert alike.module.path == "packed"


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({"kernels": "none"}, {}),
        ({"quantize": "nf4"}, {}),
        ({"fp8": "tensorwise"}, {}),
        ({}, {"sharded": True}),
        ({}, {"precision": "bf16"}),
        ({}, {"tensor": 2}),
    ],
)
def test_a_model_that_is_computed_in_another_way_is_probed(
    model: dict[str, Any], plan: dict[str, Any], tmp_path: Path, probed: list[str]
) -> None:
    own = ModelConfig(path=write_model(tmp_path, LlamaConfig(**SIZES)), dtype="fp32")
    policy = run_with_policy(own).roles["policy"]
    config = evolve(policy.spec.config, model=evolve(own, **model))
    spec = evolve(policy.spec, config=config)
    other = evolve(policy, spec=spec, plan=evolve(policy.plan, **plan), attention=None)
    assert probed_alike(evolve(policy, attention=None), [policy]) is policy.attention
    assert probed_alike(other, [policy]) is None


def test_an_engine_evaluates_after_the_choice_of_its_path() -> None:
    causal = seeded(LlamaForCausalLM, LlamaConfig(**SIZES))
    for known in (None, AttentionPath(path="packed", reason="")):
        engine = engine_of(causal.train())
        choose_path(engine, Mesh(), known=known)
        assert not causal.training


def test_a_policy_with_an_adapter_does_not_vouch_for_a_model_without(
    tmp_path: Path, probed: list[str]
) -> None:
    own = ModelConfig(path=write_model(tmp_path, LlamaConfig(**SIZES)), dtype="fp32")
    run_with_policy(own, lora=LoraConfig()).load("teacher", model=own, trained=False)
    assert probed == ["policy", "teacher"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"],
)
@pytest.mark.parametrize("known", [None, AttentionPath(path="tree", reason="")])
def test_a_weight_that_is_not_finite_is_named_with_its_file(
    known: AttentionPath | None, name: str, value: float, tmp_path: Path
) -> None:
    causal = seeded(AutoModelForCausalLM.from_config, LlamaConfig(**SIZES, pad_token_id=0))
    causal.get_parameter(name).data[..., -1] = value
    causal.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RLHFError) as caught:
        choose_path(engine_of(loaded), Mesh(), known=known)
    assert str(caught.value) == (
        f"{tmp_path}/{index['weight_map'][name]} has NaN or infinity in the weight {name}; "
        "download it again, or choose another one"
    )


def test_an_adapter_that_is_not_finite_is_named() -> None:
    causal = seeded(AutoModelForCausalLM.from_config, LlamaConfig(**SIZES, pad_token_id=0))
    settings = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal, settings)
    model.get_parameter(
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    ).data[0, 0] = float("nan")
    with pytest.raises(RLHFError) as caught:
        choose_path(engine_of(model), Mesh())
    assert str(caught.value) == (
        "the adapter has NaN or infinity in the weight "
        "model.layers.0.self_attn.q_proj.lora_A.default.weight; download it again, or choose "
        "another one"
    )


def test_a_shard_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_shardings", [])
    module = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(2, 2)})
    shards = Shards(module.parameters())
    register_sharding(shards)
    shards.parts[module["second"].weight][1] = float("inf")
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(RLHFError, match=r"^the model has NaN or infinity in the weight second\.w"):
        check_finite(module, Mesh())


@pytest.mark.parametrize(
    ("dtype", "precision", "remedy"),
    [
        (torch.float32, "fp32", "choose another model.path"),
        (torch.float16, "fp16", "set model.dtype to fp32, or choose another model.path"),
    ],
)
def test_weights_that_are_finite_are_not_blamed_for_an_overflow(
    dtype: torch.dtype, precision: str, remedy: str
) -> None:
    causal = seeded(AutoModelForCausalLM.from_config, LlamaConfig(**SIZES, pad_token_id=0))
    causal.to(dtype).model.norm.weight.data.fill_(torch.finfo(dtype).max)
    with pytest.raises(RLHFError) as caught:
        choose_path(engine_of(causal, precision), Mesh())
    assert str(caught.value) == (
        f"LlamaForCausalLM computes NaN or infinity in {precision}, although its weights are "
        f"finite; {remedy}"
    )


def test_a_weight_that_only_the_rows_of_the_run_use_is_named_by_the_step(
    tmp_path: Path, cache: Path
) -> None:
    words = tiny.short_run(tmp_path, "demonstration")
    config = LlamaConfig.from_pretrained(tmp_path / "model", tie_word_embeddings=False)
    causal = seeded(AutoModelForCausalLM.from_config, config)
    batch = probe_batch(engine_of(causal), 512)
    unused = sorted({*range(config.vocab_size)} - {*batch.tokens.tolist()})
    causal.model.embed_tokens.weight.data[unused] = float("nan")
    causal.save_pretrained(tmp_path / "model")
    with pytest.raises(RLHFError) as caught:
        tiny.run("sft", [*words, "--output", str(tmp_path / "run")], str(cache), plain=True)
    assert str(caught.value) == (
        f"{tmp_path}/model/model.safetensors has NaN or infinity in the weight "
        "model.embed_tokens.weight; download it again, or choose another one"
    )
