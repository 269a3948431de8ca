"""Loading, adapters, freezing and groups of parameters."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Shards
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from small_models import SIZES, config_of, empty, load, write_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
)

from rlhf import sharding
from rlhf.config.sections import (
    LORA_VARIANTS,
    READ_BASE,
    LoraConfig,
    OptimConfig,
    TrainConfig,
)
from rlhf.engine import free, is_sharded, register_sharding, whole_shape
from rlhf.model.adapters import base_reader
from rlhf.model.shape import shape_of
from rlhf.model.trainable import parameter_groups


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(
        tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, tie_word_embeddings=True)
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    return write_model(tmp_path_factory.mktemp("mixtral"), config)


def logits(causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("stage", [0, 3])
def test_loaded_weights_are_those_of_transformers_at_every_stage(
    family: str, stage: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    module = load(config_of(path), stage=stage)
    own = AutoModelForCausalLM.from_pretrained(path)
    module.path = "separate"
    assert torch.equal(logits(module.causal), logits(own))
    head, embedding = module.causal.lm_head.weight, module.causal.get_input_embeddings().weight
    assert (head is embedding) == (family == "llama")


@pytest.mark.parametrize("how", [{"stage": 0}, {"stage": 3}, {"init": "random"}])
def test_a_model_keeps_the_generation_config_of_its_folder(
    how: dict[str, Any], tmp_path: Path
) -> None:
    path = write_model(tmp_path, LlamaConfig(**SIZES))
    GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8).save_pretrained(path)
    config = config_of(path, model={"init": how.get("init", "pretrained")})
    own = load(config, stage=how.get("stage", 0)).causal.generation_config
    assert (own.do_sample, own.temperature, own.top_p) == (True, 0.7, 0.8)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_weights_keep_their_rotary_frequencies_in_float32(
    llama: str, precision: str, stage: int
) -> None:
    module = load(config_of(llama), precision=precision, stage=stage)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_random_weights_depend_only_on_the_seed(llama: str) -> None:
    def weights(seed: int, **options: Any) -> dict[str, torch.Tensor]:
        config = config_of(llama, model={"init": "random"}, train=TrainConfig(seed=seed))
        torch.rand(3)
        return load(config, **options).state_dict()

    first, sharded, other = weights(0), weights(0, stage=3), weights(1)
    rounded = weights(0, precision="bf16")
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], sharded[name])
    assert torch.equal(first[name].bfloat16(), rounded[name])
    assert not torch.equal(first[name], other[name])


def test_loading_does_not_change_the_random_state(llama: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(config_of(llama, model={"init": "random"}, lora=LoraConfig()))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("stage", [0, 3])
def test_only_the_adapter_is_trained_and_it_starts_the_same_at_every_stage(
    llama: str, stage: int
) -> None:
    module = load(config_of(llama, lora=LoraConfig(rank=4)), stage=stage, precision="bf16")
    assert isinstance(module.model, PeftModel)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    again = load(config_of(llama, lora=LoraConfig(rank=4)), precision="bf16").state_dict()
    for name in trained:
        assert torch.equal(module.state_dict()[name], again[name])
    assert module.model.peft_config["default"].lora_alpha == 8


@pytest.mark.parametrize(("rslora", "scale"), [(False, 8 / 4), (True, 8 / 2)])
def test_rslora_scales_the_update_by_the_root_of_the_rank(
    llama: str, rslora: bool, scale: float
) -> None:
    module = load(config_of(llama, lora=LoraConfig(rank=4, alpha=8, rslora=rslora)))
    layers = [part for part in module.modules() if isinstance(part, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {scale}


@pytest.mark.parametrize("name", LORA_VARIANTS)
def test_each_variant_of_lora_turns_on_only_its_own_argument_of_peft(llama: str, name: str) -> None:
    module = load(config_of(llama, lora=LoraConfig(rank=4, **{name: True})))
    settings = module.model.peft_config["default"]
    found = {ours: getattr(settings, theirs) for ours, theirs in LORA_VARIANTS.items()}
    assert found == dict.fromkeys(LORA_VARIANTS, False) | {name: True}
    assert base_reader(settings) == READ_BASE.get(name)


@pytest.mark.parametrize("lora", [{"dora": True}, {"modules_to_save": ("embed_tokens", "norm")}])
def test_what_is_trained_beside_an_adapter_is_counted_without_weights(
    llama: str, lora: dict[str, Any]
) -> None:
    config = config_of(llama, lora=LoraConfig(rank=4, **lora))
    module, shape = load(config), shape_of(empty(config))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert trained > shape_of(empty(config_of(llama, lora=LoraConfig(rank=4)))).trainable
    assert trained == shape.trainable
    assert sum(p.numel() for p in module.parameters()) == shape.parameters


def test_an_adapter_folder_is_trained_further(llama: str, tmp_path: Path) -> None:
    module = load(config_of(llama, lora=LoraConfig(rank=4)))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.5)
    module.model.save_pretrained(tmp_path)
    config = config_of(llama, model={"adapter": str(tmp_path)})
    again = load(config)
    trained = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert all(bool((p == 0.5).all()) for name, p in trained.items() if "lora_B" in name)
    assert sum(p.numel() for p in trained.values()) == shape_of(empty(config)).trainable


@pytest.mark.parametrize("read", [load, empty])
def test_an_adapter_that_is_trained_further_names_the_base_that_it_is_trained_on(
    read: Any, llama: str, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", LlamaConfig(**SIZES, tie_word_embeddings=True))
    load(config_of(other, lora=LoraConfig(rank=4))).model.save_pretrained(tmp_path / "adapter")
    module = read(config_of(llama, model={"adapter": str(tmp_path / "adapter")}))
    settings = module.model.active_peft_config
    assert (settings.base_model_name_or_path, settings.revision) == (llama, None)


def test_the_shape_is_counted_without_weights(llama: str) -> None:
    config = config_of(llama)
    shape = shape_of(empty(config))
    module = load(config)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert shape.trainable == shape.parameters
    assert shape.largest_layer == sum(p.numel() for p in module.causal.model.layers[0].parameters())
    assert (shape.hidden, shape.layers) == (32, 2)
    assert (shape.head, shape.lookup) == (32 * 40, 0), "the head is the embedding"


def test_frozen_parameters_are_left_out_of_the_groups(llama: str) -> None:
    module = load(config_of(llama, model={"freeze": ("*.layers.0.*", "model.embed_tokens.*")}))
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert all(".layers.0." in name or "embed_tokens" in name for name in frozen)
    grouped = sum(len(group["params"]) for group in parameter_groups(module, OptimConfig()))
    assert grouped == sum(p.requires_grad for p in module.parameters())


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    module = load(config_of(write_model(tmp_path, config)))
    decayed, kept = parameter_groups(module, OptimConfig(weight_decay=0.1))
    names = {id(p): name for name, p in module.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(re.search(r"(wte|wpe|c_\w+)\.weight$", names[id(p)]) for p in decayed["params"])
    assert all(re.search(r"bias$|ln_\w+\.weight$", names[id(p)]) for p in kept["params"])


def test_weight_decay_of_a_flat_shard_depends_on_its_whole_shape(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_shardings", [])
    module = load(config_of(llama))
    whole = [len(group["params"]) for group in parameter_groups(module, OptimConfig())]
    register_sharding(Shards(module.parameters()))
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert [len(group["params"]) for group in parameter_groups(module, OptimConfig())] == whole


def test_a_sharded_parameter_is_freed_with_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_shardings", [])
    sharded, whole = (torch.nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    shards = Shards([sharded])
    register_sharding(shards)
    sharded.data = torch.empty(0)
    assert (is_sharded(sharded), is_sharded(whole)) == (True, False)
    assert (whole_shape(sharded), whole_shape(whole)) == ((2, 4), (2, 4))
    for parameter in (sharded, whole):
        free(parameter)
    assert (whole.numel(), shards.parts[sharded].numel()) == (0, 0)


def test_recomputation_works_under_an_adapter(llama: str) -> None:
    module = load(config_of(llama, model={"recompute": "full"}, lora=LoraConfig(rank=2))).train()
    assert module.causal.is_gradient_checkpointing
    module.causal(input_ids=torch.arange(5)[None]).logits.sum().backward()
    assert any(p.grad is not None for p in module.parameters())
