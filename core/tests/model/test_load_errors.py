"""Errors of models, adapters and tokenizers that a user can fix."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from small_models import SIZES, config_of, empty, load, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
)

from rlhf.config.sections import Config, DataConfig, LoraConfig, ModelConfig
from rlhf.errors import RLHFError, listed
from rlhf.model import tokenizer
from rlhf.model.adapters import check_uncompiled
from rlhf.model.architecture import check_unquantized
from rlhf.model.tokenizer import load_tokenizer, read_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(
        tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, tie_word_embeddings=True)
    )


def failing(config: Config, **options: Any) -> str:
    with pytest.raises(RLHFError) as caught:
        load(config, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "hub name"])
def test_a_path_that_is_not_a_model_is_reported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the hub's client tries for 24 seconds to reach it.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    path = str(tmp_path) if kind == "folder" else "someone/nothing"
    assert failing(config_of(path)).startswith(
        f"model.path {path} is neither a folder with a config.json nor a readable model on the "
        "hub: "
    )
    assert failing(config_of("")) == "model.path is empty; pass a model folder or a name on the hub"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration"),
        (BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (T5Config(), "t5"),
    ],
)
def test_other_than_causal_models_are_refused_before_weights_are_read(
    config: Any, what: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert failing(config_of(str(tmp_path))) == (
        f"model.path {tmp_path} is {what}, not a causal language model; choose one that "
        f"transformers opens with AutoModelForCausalLM"
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_a_head_is_refused(tmp_path: Path, stage: int) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    assert failing(config_of(str(tmp_path)), stage=stage) == (
        f"{tmp_path} has no weights for lm_head.weight of LlamaForCausalLM: model.path must be a "
        f"complete causal language model"
    )


def test_a_config_without_weights_says_how_to_make_some(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    message = failing(config_of(str(tmp_path)))
    assert message.startswith(f"cannot load the weights of {tmp_path}: ")
    assert message.endswith("; check model.path, or set model.init to random for new weights")


def changed(folder: str, target: Path, **settings: Any) -> str:
    """A copy of a model folder whose config.json says something else."""
    shutil.copytree(folder, target)
    tree = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(tree))
    return str(target)


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq", "awq", "bitsandbytes"])
def test_quantized_weights_are_refused(llama: str, tmp_path: Path, method: str) -> None:
    path = changed(llama, tmp_path / "model", quantization_config={"quant_method": method})
    assert failing(config_of(path)) == (
        f"model.path {path} has quantized weights ({method}), which cannot be used here; choose "
        "the model that they were made from, or unpack them once as docs/models.md shows"
    )


def test_quantized_weights_are_found_in_the_text_part_of_a_config(tmp_path: Path) -> None:
    text = Gemma3TextConfig(**SIZES)
    text.quantization_config = {"quant_method": "gptq"}
    config = Gemma3Config(text_config=text)
    with pytest.raises(RLHFError, match=r"quantized weights \(gptq\)"):
        check_unquantized(config, "m")
    text.quantization_config = {}
    check_unquantized(config, "m")


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_of_another_shape_are_named(llama: str, tmp_path: Path, stage: int) -> None:
    path = changed(llama, tmp_path / "model", intermediate_size=40)
    assert failing(config_of(path), stage=stage) == (
        f"{path} has model.layers.0.mlp.down_proj.weight of shape [32, 48] where its config.json "
        "specifies [32, 40]: weights and config must belong to one model"
    )


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("left", [0, 1000])
def test_a_torn_file_of_weights_is_reported(
    llama: str, tmp_path: Path, left: int, stage: int
) -> None:
    path = changed(llama, tmp_path / "model")
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(left)
    problem = "truncated, or not a safetensors file" if left else "empty"
    assert failing(config_of(path), stage=stage) == (
        f"{path}/model.safetensors is {problem}; download it again"
    )


def test_unused_weights_are_reported(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(llama, tmp_path / "model", num_hidden_layers=1)
    load(config_of(path))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: {path} has 9 weights that LlamaForCausalLM does not use: "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 others"
    )


def test_weights_that_transformers_lists_as_harmless_are_not_reported(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(llama, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in (0, 1)}
    save_file(load_file(file) | old, file, {"format": "pt"})
    load(config_of(path))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c", "d"], "a, b, c and d"),
        ([*"abcde"], "a, b, c and 2 others"),
    ],
)
def test_a_few_names_are_listed_and_then_counted(names: list[str], text: str) -> None:
    assert listed(names) == text


@pytest.mark.parametrize("settings", [{"hidden_size": "x"}, {"num_attention_heads": 3}])
def test_an_invalid_model_config_is_reported(
    llama: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = changed(llama, tmp_path / "model", **settings)
    # Which line says so depends on how much of a config transformers looks at.
    assert path in failing(config_of(path))


def test_an_adapter_that_does_not_load_is_reported(llama: str, tmp_path: Path) -> None:
    module = load(config_of(llama, lora=LoraConfig(rank=2)))
    module.model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "r": 4}))
    start = f"cannot load the adapter {tmp_path} into LlamaForCausalLM: "
    assert failing(config_of(llama, model={"adapter": str(tmp_path)})).startswith(
        f"{start}Error(s) in"
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    assert failing(config_of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path}/adapter_model.safetensors is truncated, or not a safetensors file; download "
        "it again"
    )
    (tmp_path / "adapter_model.safetensors").unlink()
    assert failing(config_of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path} has no adapter_model.safetensors; pass a complete adapter folder"
    )
    (tmp_path / "adapter_config.json").write_text("{")
    assert failing(config_of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path}/adapter_config.json is truncated, or not a JSON file; download it again"
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "NONSENSE"}')
    assert failing(config_of(llama, model={"adapter": str(tmp_path)})) == (
        f"{tmp_path} is not an adapter folder: it has no readable adapter_config.json"
    )


def test_no_request_waits_for_ever_for_a_hub_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask_for_description(name: str, **_: Any) -> None:
        # transformers' tokenizers do this, without a limit.
        HfApi(endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}").model_info(name)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", ask_for_description)
    monkeypatch.setattr(tokenizer, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RLHFError, match=r"^no tokenizer in owner/name \(.*timed out"),
    ):
        read_tokenizer(ModelConfig(tokenizer="owner/name"))


def test_a_name_that_the_hub_does_not_allow_is_reported(llama: str) -> None:
    with pytest.raises(RLHFError, match=r"^no tokenizer in two words \("):
        load_tokenizer(config_of(llama, model={"tokenizer": "two words"}))
    assert failing(config_of("two words")).startswith("model.path two words is neither a folder ")


def test_every_target_of_an_adapter_must_exist(llama: str) -> None:
    modules = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for targets, unknown in ((("q_proj", "nope"), "nope"), ((), "[]")):
        assert failing(config_of(llama, lora=LoraConfig(targets=targets))) == (
            f"lora.targets {unknown} names no module of LlamaForCausalLM; its linear modules: "
            f"{modules}"
        )


def test_a_pattern_that_freezes_nothing_gets_similar_names(llama: str) -> None:
    assert failing(config_of(llama, model={"freeze": ("*.embed_token.*",)})).startswith(
        "model.freeze pattern *.embed_token.* matches no parameter; similar names: "
        "model.embed_tokens.weight, "
    )
    assert failing(config_of(llama, model={"freeze": ("*",)})) == (
        "model.freeze * leaves nothing to train; freeze fewer parameters"
    )


def test_wrong_targets_of_an_adapter_are_reported(llama: str) -> None:
    assert failing(config_of(llama, lora=LoraConfig(targets=("q_porj",)))) == (
        "lora.targets q_porj names no module of LlamaForCausalLM; its linear modules: "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert failing(config_of(llama, lora=LoraConfig(targets=("q_proj", "lm_head")))) == (
        "lora.targets names the head lm_head, whose adapter would not affect the "
        "log-probabilities; remove lm_head"
    )


def test_modules_that_cannot_be_trained_whole_are_refused(llama: str, tmp_path: Path) -> None:
    for name in ("embed_token", "layers"):
        assert failing(config_of(llama, lora=LoraConfig(modules_to_save=(name,)))).startswith(
            f"lora.modules_to_save {name} names no module of LlamaForCausalLM; similar names: "
        )
    gpt2 = write_model(tmp_path, GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))
    assert failing(config_of(gpt2, lora=LoraConfig(modules_to_save=("wte",)))) == (
        "GPT2LMHeadModel shares one weight between embedding and head, which peft would separate; "
        "remove wte from lora.modules_to_save"
    )


def test_a_dora_adapter_is_not_trained_further_at_stage_3(llama: str, tmp_path: Path) -> None:
    load(config_of(llama, lora=LoraConfig(rank=2, dora=True))).model.save_pretrained(tmp_path)
    config = config_of(llama, model={"adapter": str(tmp_path)})
    assert load(config).model.peft_config["default"].use_dora
    assert failing(config, stage=3) == (
        f"model.adapter {tmp_path} is a DoRA adapter, which cannot be trained at ZeRO stage 3; "
        "choose stage 2 or lower"
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_only_a_lora_adapter_is_trained_further(stage: int, llama: str, tmp_path: Path) -> None:
    causal = AutoModelForCausalLM.from_pretrained(llama)
    settings = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    peft.get_peft_model(causal, settings).save_pretrained(tmp_path)
    assert failing(config_of(llama, model={"adapter": str(tmp_path)}), stage=stage) == (
        f"model.adapter {tmp_path} is not a LoRA adapter; merge it into its base first, or choose "
        "another adapter"
    )


MERGE = "merge it into its base first with rlhf merge, and set lora to train a new adapter"
OTHER = "; choose another adapter"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"init_lora_weights": "pissa"},
            "was initialized by pissa, which may have changed the weights of its base; " + MERGE,
        ),
        (
            {"init_lora_weights": "olora"},
            "was initialized by olora, which may have changed the weights of its base; " + MERGE,
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "adapts the output head, whose adapter would not affect the log-probabilities" + OTHER,
        ),
        (
            {"trainable_token_indices": [3, 5]},
            "adapts the output head, whose adapter would not affect the log-probabilities" + OTHER,
        ),
        (
            {"modules_to_save": ["embed_tokens"]},
            "separates the embedding from the head, although both share one weight" + OTHER,
        ),
    ],
)
def test_an_existing_adapter_whose_losses_would_be_wrong_is_refused(
    settings: dict[str, Any], problem: str, llama: str, tmp_path: Path
) -> None:
    causal = AutoModelForCausalLM.from_pretrained(llama)
    adapter = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | settings)
    peft.get_peft_model(causal, adapter).save_pretrained(tmp_path)
    with pytest.raises(RLHFError) as caught:
        empty(config_of(llama, model={"adapter": str(tmp_path)}))
    assert str(caught.value) == f"model.adapter {tmp_path} {problem}"


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        (
            {"use_dora": True, "target_modules": ["q_proj"]},
            {"fp8": "rowwise"},
            "has DoRA, which cannot be combined with model.fp8; remove model.fp8",
        ),
        (
            {"target_parameters": ["experts.down_proj"]},
            {"kernels": "compile"},
            "has adapters of stacked weights, which cannot be combined with model.kernels compile; "
            "remove model.kernels compile",
        ),
    ],
)
def test_an_existing_adapter_that_cannot_be_compiled_is_refused(
    settings: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(RLHFError) as error:
        check_uncompiled("folder", peft.LoraConfig(**settings), ModelConfig(**model))
    assert str(error.value) == f"model.adapter folder {message}"
    check_uncompiled("folder", peft.LoraConfig(**settings), ModelConfig())


def test_four_bits_are_refused_without_lora_without_cuda_and_at_stage_3(llama: str) -> None:
    assert failing(config_of(llama, model={"quantize": "nf4"})) == (
        "model.quantize nf4 freezes the whole model; add lora to train an adapter"
    )
    config = config_of(llama, model={"quantize": "nf4"}, lora=LoraConfig())
    assert failing(config) == (
        "model.quantize nf4 needs a CUDA device; this run is on cpu, so remove model.quantize"
    )
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
        config = config_of("", model={"tokenizer": path}, data=DataConfig(chat_template=template))
        return load_tokenizer(config).apply_chat_template(turns, tokenize=False)

    assert rendered(str(own)) == "hi"
    assert rendered("chatml") == "<|im_start|>user\nhi<|im_end|>\n"
    with pytest.raises(RLHFError, match=r"^data.chat_template nosuch is not a file; pass a "):
        rendered("nosuch")
    own.write_bytes(b"\xe9")
    with pytest.raises(RLHFError, match=rf"^cannot read data.chat_template {own}: 'utf-8' codec"):
        rendered(str(own))


def test_chat_templates_without_a_default_are_named(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    templates = [{"name": name, "template": "a"} for name in ("rag", "tool_use")]
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": templates}))
    config = config_of("", model={"tokenizer": path})
    with pytest.raises(RLHFError) as caught:
        load_tokenizer(config)
    assert str(caught.value) == (
        "the tokenizer has the chat templates rag, tool_use, and none is called default; set "
        "data.chat_template to a file with one of them"
    )
    chosen = config_of("", model={"tokenizer": path}, data=DataConfig(chat_template="chatml"))
    assert load_tokenizer(chosen).chat_template


def test_a_chat_template_has_the_arguments_of_the_configuration_as_defaults(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path)
    own = tmp_path / "own.jinja"
    own.write_text("\n{{ messages[0]['content'] }}{% if thinking %}{{ style }}{% endif %}")
    turns = [{"role": "user", "content": "hi"}]

    def load(**data: Any) -> Any:
        return load_tokenizer(config_of("", model={"tokenizer": path}, data=DataConfig(**data)))

    values = {"thinking": True, "style": "it's \"\n\u00e9"}
    tokenizer = load(chat_template=str(own), chat_template_kwargs=values)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for each in (tokenizer, again):
        assert each.apply_chat_template(turns, tokenize=False) == f"\nhi{values['style']}"
        assert each.apply_chat_template(turns, tokenize=False, thinking=False) == "\nhi"
    for name in ("thinkin", "messages"):
        with pytest.raises(RLHFError) as caught:
            load(chat_template=str(own), chat_template_kwargs={name: 1})
        assert str(caught.value) == (
            f"data.chat_template_kwargs: {name!r} is not an argument of the chat template; "
            "remove it"
        )
    with pytest.raises(RLHFError) as caught:
        load(chat_template_kwargs=values)
    assert str(caught.value) == (
        "data.chat_template_kwargs needs one chat template, and the tokenizer has none; set "
        "data.chat_template"
    )


@pytest.mark.parametrize("read", [load, load_tokenizer])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("{folder}/gone", "does not exist"),
        ("./gone", "does not exist"),
        ("../gone", "does not exist"),
        ("~/gone", "does not exist"),
        ("gone/", "does not exist"),
        ("runs/gone/model", "does not exist"),
        ("{folder}/file", "is not a folder"),
        ("file", "is not a folder"),
    ],
)
def test_a_path_that_is_not_a_folder_is_not_taken_for_a_hub_name(
    read: Any, path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = path.format(folder=tmp_path)
    with pytest.raises(RLHFError) as caught:
        read(config_of(path))
    assert str(caught.value) == (
        f"model.path {path} {problem}; pass a model folder or a name on the hub"
    )


def test_a_missing_folder_of_a_tokenizer_is_named_by_its_setting() -> None:
    with pytest.raises(RLHFError) as caught:
        load_tokenizer(config_of("", model={"tokenizer": "./gone"}))
    assert str(caught.value) == (
        "model.tokenizer ./gone does not exist; pass a model folder or a name on the hub"
    )


def test_a_model_in_the_home_folder_is_loaded(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(llama).parent))
    assert load(config_of(f"~/{Path(llama).name}")).causal.config.model_type == "llama"


@pytest.mark.parametrize("read", [load, load_tokenizer])
def test_an_adapter_or_a_run_folder_in_place_of_a_model_is_named(read: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RLHFError) as caught:
        read(config_of(str(tmp_path)))
    assert str(caught.value) == (
        f"model.path {tmp_path} is an adapter; set model.adapter to it and model.path to its base, "
        "or merge it first with rlhf merge"
    )
    (tmp_path / "adapter_config.json").rename(tmp_path / "config.yaml")
    (tmp_path / "model").mkdir()
    with pytest.raises(RLHFError) as caught:
        read(config_of(str(tmp_path)))
    assert str(caught.value) == (
        f"model.path {tmp_path} is a run folder; did you mean {tmp_path}/model?"
    )


@pytest.mark.parametrize("read", [load, load_tokenizer])
def test_a_model_with_an_adapter_beside_it_is_refused(
    read: Any, llama: str, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RLHFError) as caught:
        read(config_of(str(tmp_path)))
    assert str(caught.value) == (
        f"model.path {tmp_path} has the weights of a model and an adapter_config.json, whose "
        "adapter transformers would put on them; move the adapter's files to a folder of their own"
    )


def test_a_missing_tokenizer_is_reported(llama: str) -> None:
    remedy = "check the name, or set model.tokenizer"
    with pytest.raises(RLHFError, match=rf"^no tokenizer in {llama} .*; {remedy}$"):
        load_tokenizer(config_of(llama))
