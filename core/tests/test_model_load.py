"""Loading, adapters, freezing, groups of parameters, and the errors that a user can mend."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Shards, WholeWeights
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from rlhf import engine
from rlhf.config.sections import Config, DataConfig, LoraConfig, ModelConfig, TrainConfig
from rlhf.engine import Mesh, Plan, free, is_sharded, register_sharding, whole_shape
from rlhf.errors import RLHFError
from rlhf.model.load import load_model
from rlhf.model.parameter_groups import parameter_groups
from rlhf.model.shape import empty_model, shape_of
from rlhf.model.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}


def load(config: Config, *, stage: int = 0, precision: str = "fp32") -> Any:
    plan = Plan(stage=stage, precision=precision)
    return load_model(config, plan=plan, mesh=Mesh(), hooks=WholeWeights())


def saved(folder: Path, config: Any) -> str:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    return saved(tmp_path_factory.mktemp("mixtral"), config)


def of(path: str, **sections: Any) -> Config:
    model = sections.pop("model", {})
    return Config(model=ModelConfig(path=path, **model), **sections)


def logits(causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("stage", [0, 3])
def test_loaded_weights_are_those_of_transformers_at_every_stage(
    family: str, stage: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    module = load(of(path), stage=stage)
    own = AutoModelForCausalLM.from_pretrained(path)
    module.path = "separate"
    assert torch.equal(logits(module.causal), logits(own))
    head, embedding = module.causal.lm_head.weight, module.causal.get_input_embeddings().weight
    assert (head is embedding) == (family == "llama")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_weights_keep_their_rotary_frequencies_in_float32(
    llama: str, precision: str, stage: int
) -> None:
    module = load(of(llama), precision=precision, stage=stage)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_random_weights_follow_the_seed_alone(llama: str) -> None:
    def weights(seed: int, **options: Any) -> dict[str, torch.Tensor]:
        config = of(llama, model={"init": "random"}, train=TrainConfig(seed=seed))
        torch.rand(3)
        return load(config, **options).state_dict()

    first, sharded, other = weights(0), weights(0, stage=3), weights(1)
    rounded = weights(0, precision="bf16")
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], sharded[name])
    assert torch.equal(first[name].bfloat16(), rounded[name])
    assert not torch.equal(first[name], other[name])


def test_loading_leaves_the_generators_of_random_numbers_alone(llama: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(of(llama, model={"init": "random"}, lora=LoraConfig()))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_trains_itself_alone_and_starts_the_same_everywhere(
    llama: str, stage: int
) -> None:
    module = load(of(llama, lora=LoraConfig(rank=4)), stage=stage, precision="bf16")
    assert isinstance(module.model, PeftModel)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    again = load(of(llama, lora=LoraConfig(rank=4)), precision="bf16").state_dict()
    for name in trained:
        assert torch.equal(module.state_dict()[name], again[name])
    assert module.model.peft_config["default"].lora_alpha == 8


def test_an_adapter_folder_is_trained_further(llama: str, tmp_path: Path) -> None:
    module = load(of(llama, lora=LoraConfig(rank=4)))
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.5)
    module.model.save_pretrained(tmp_path)
    config = of(llama, model={"adapter": str(tmp_path)})
    again = load(config)
    trained = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert all(bool((p == 0.5).all()) for name, p in trained.items() if "lora_B" in name)
    assert sum(p.numel() for p in trained.values()) == shape_of(empty_model(config)).trainable


def test_the_shape_is_counted_without_weights(llama: str) -> None:
    config = of(llama)
    shape = shape_of(empty_model(config))
    module = load(config)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert shape.trainable == shape.parameters
    assert shape.largest_layer == sum(p.numel() for p in module.causal.model.layers[0].parameters())
    assert (shape.hidden, shape.layers) == (16, 2)
    assert (shape.head, shape.lookup) == (16 * 40, 0), "the head is the embedding"


def test_frozen_parameters_are_left_out_of_the_groups(llama: str) -> None:
    module = load(of(llama, model={"freeze": ("*.layers.0.*", "model.embed_tokens.*")}))
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert all(".layers.0." in name or "embed_tokens" in name for name in frozen)
    grouped = sum(len(group["params"]) for group in parameter_groups(module, 0.1))
    assert grouped == sum(p.requires_grad for p in module.parameters())


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    module = load(of(saved(tmp_path, config)))
    decayed, kept = parameter_groups(module, 0.1)
    names = {id(p): name for name, p in module.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(re.search(r"(wte|wpe|c_\w+)\.weight$", names[id(p)]) for p in decayed["params"])
    assert all(re.search(r"bias$|ln_\w+\.weight$", names[id(p)]) for p in kept["params"])


def test_a_flat_shard_decays_by_the_shape_it_was_created_with(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_shardings", [])
    module = load(of(llama))
    whole = [len(group["params"]) for group in parameter_groups(module, 0.1)]
    register_sharding(Shards(module.parameters()))
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    assert [len(group["params"]) for group in parameter_groups(module, 0.1)] == whole


def test_a_sharded_parameter_is_freed_with_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_shardings", [])
    sharded, whole = (torch.nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    shards = Shards([sharded])
    register_sharding(shards)
    sharded.data = torch.empty(0)
    assert (is_sharded(sharded), is_sharded(whole)) == (True, False)
    assert (whole_shape(sharded), whole_shape(whole)) == ((2, 4), (2, 4))
    for parameter in (sharded, whole):
        free(parameter)
    assert (whole.numel(), shards.shards[sharded].numel()) == (0, 0)


def test_recomputation_works_under_an_adapter(llama: str) -> None:
    module = load(of(llama, model={"recompute": "full"}, lora=LoraConfig(rank=2))).train()
    assert module.causal.is_gradient_checkpointing
    module.causal(input_ids=torch.arange(5)[None]).logits.sum().backward()
    assert any(p.grad is not None for p in module.parameters())


def failing(config: Config, **options: Any) -> str:
    with pytest.raises(RLHFError) as caught:
        load(config, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_that_is_not_a_model_is_reported(tmp_path: Path) -> None:
    assert failing(of(str(tmp_path / "nothing"))).startswith(
        f"model.path {tmp_path}/nothing is neither a folder with a config.json nor a readable "
        f"model on the hub: "
    )
    assert failing(of("")) == "model.path is empty; pass a model folder or a name on the hub"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (T5Config(), "t5"),
    ],
)
def test_what_is_not_a_causal_model_is_refused_before_weights_are_read(
    config: Any, what: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert failing(of(str(tmp_path))) == (
        f"model.path {tmp_path} is {what}, not a causal language model; choose one that "
        f"transformers opens with AutoModelForCausalLM"
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_a_head_is_refused(tmp_path: Path, stage: int) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    assert failing(of(str(tmp_path)), stage=stage) == (
        f"{tmp_path} has no weights for lm_head.weight of LlamaForCausalLM: model.path must be a "
        f"complete causal language model"
    )


def test_a_config_without_weights_says_how_to_make_some(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    message = failing(of(str(tmp_path)))
    assert message.startswith(f"cannot load the weights of {tmp_path}: ")
    assert message.endswith("; check model.path, or set model.init to random for new weights")


def changed(folder: str, target: Path, **settings: Any) -> str:
    """A copy of a model folder whose config.json says something else."""
    shutil.copytree(folder, target)
    tree = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(tree))
    return str(target)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_of_another_shape_are_named(llama: str, tmp_path: Path, stage: int) -> None:
    path = changed(llama, tmp_path / "model", intermediate_size=32)
    assert failing(of(path), stage=stage) == (
        f"{path} has model.layers.0.mlp.down_proj.weight of shape [16, 24] where its config.json "
        "specifies [16, 32]: weights and config must belong to one model"
    )


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("left", [0, 1000])
def test_a_torn_file_of_weights_is_reported(
    llama: str, tmp_path: Path, left: int, stage: int
) -> None:
    path = changed(llama, tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(left)
    message = failing(of(path), stage=stage)
    assert message.startswith(
        f"cannot load the weights of {path}: Error while deserializing header"
    )
    assert message.endswith("; check model.path, or set model.init to random for new weights")


def test_weights_that_the_model_has_no_use_for_are_reported(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(llama, tmp_path / "model", num_hidden_layers=1)
    load(of(path))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: {path} has 9 weights that LlamaForCausalLM does not use, such as "
        "model.layers.1.input_layernorm.weight"
    )


@pytest.mark.parametrize("settings", [{"hidden_size": "x"}, {"num_attention_heads": 3}])
def test_a_config_that_makes_no_model_is_reported(
    llama: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = changed(llama, tmp_path / "model", **settings)
    # Which line says so depends on how much of a config transformers looks at.
    assert path in failing(of(path))


def test_an_adapter_that_does_not_load_is_reported(llama: str, tmp_path: Path) -> None:
    module = load(of(llama, lora=LoraConfig(rank=2)))
    module.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "r": 4}))
    start = f"cannot load the adapter {tmp_path} into LlamaForCausalLM: "
    assert failing(of(llama, model={"adapter": str(tmp_path)})).startswith(f"{start}Error(s) in")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    assert failing(of(llama, model={"adapter": str(tmp_path)})).startswith(f"{start}Error while")
    (tmp_path / "adapter_model.safetensors").unlink()
    assert failing(of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path} has no adapter_model.safetensors; pass a complete adapter folder"
    )
    (tmp_path / "adapter_config.json").write_text("{")
    assert failing(of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path} is not an adapter folder: it has no readable adapter_config.json"
    )


def test_every_target_of_an_adapter_must_be_there(llama: str) -> None:
    modules = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for targets, unknown in ((("q_proj", "nope"), "nope"), ((), "[]")):
        assert failing(of(llama, lora=LoraConfig(targets=targets))) == (
            f"lora.targets {unknown} names no module of LlamaForCausalLM; its linear modules: "
            f"{modules}"
        )


def test_a_pattern_that_freezes_nothing_names_what_is_near(llama: str) -> None:
    assert failing(of(llama, model={"freeze": ("*.embed_token.*",)})).startswith(
        "model.freeze pattern *.embed_token.* matches no parameter; similar names: "
        "model.embed_tokens.weight, "
    )
    assert failing(of(llama, model={"freeze": ("*",)})) == (
        "model.freeze * leaves nothing to train; freeze fewer parameters"
    )


def test_wrong_targets_of_an_adapter_are_reported(llama: str) -> None:
    assert failing(of(llama, lora=LoraConfig(targets=("q_porj",)))) == (
        "lora.targets q_porj names no module of LlamaForCausalLM; its linear modules: "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert failing(of(llama, lora=LoraConfig(targets=("q_proj", "lm_head")))) == (
        "lora.targets names the head lm_head, whose adapter would not affect the "
        "log-probabilities; remove lm_head"
    )


def test_four_bits_are_refused_where_they_cannot_be(llama: str) -> None:
    assert failing(of(llama, model={"quantize": "nf4"})) == (
        "model.quantize nf4 freezes the whole model; add lora to train an adapter"
    )
    config = of(llama, model={"quantize": "nf4"}, lora=LoraConfig())
    assert failing(config) == "model.quantize nf4 needs a CUDA device; this run is on cpu"
    assert failing(config, stage=3) == (
        "model.quantize nf4 cannot be sharded at ZeRO stage 3; choose stage 2 or lower, or "
        "remove model.quantize"
    )


def tokenizer_folder(folder: Path) -> str:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def test_a_chat_template_comes_from_a_file_or_by_name(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0]['content'] }}")
    turns = [{"role": "user", "content": "hi"}]

    def rendered(template: str) -> str:
        config = of("", model={"tokenizer": path}, data=DataConfig(chat_template=template))
        return load_tokenizer(config).apply_chat_template(turns, tokenize=False)

    assert rendered(str(own)) == "hi"
    assert rendered("chatml") == "<|im_start|>user\nhi<|im_end|>\n"
    with pytest.raises(RLHFError, match=r"^data.chat_template nosuch is not a file; pass a "):
        rendered("nosuch")
    own.write_bytes(b"\xe9")
    with pytest.raises(RLHFError, match=rf"^cannot read data.chat_template {own}: 'utf-8' codec"):
        rendered(str(own))


def test_a_model_folder_that_is_not_there_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("gone", "file"):
        with pytest.raises(RLHFError) as caught:
            load_tokenizer(of(str(tmp_path / name)))
        assert str(caught.value) == (
            f"{tmp_path / name} is not a folder; pass a model folder or a name on the hub"
        )


def test_a_missing_tokenizer_is_reported(llama: str) -> None:
    with pytest.raises(RLHFError, match=rf"^no tokenizer in {llama} .*; set model.tokenizer$"):
        load_tokenizer(of(llama))
