"""What an adapter trains is exported: adapters on the embedding, and adapter folders whose weights
are not those of the adapter."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import chatml_tokenizer
from safetensors.torch import load_file, save_file
from small_models import SIZES, config_of, empty, write_model
from small_models import load as load_causal
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf.commands.merge import merge_command
from rlhf.config.sections import Config, LoraConfig
from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.model.exported import exported_model
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel
from rlhf.model.role import ModelSpec
from rlhf.model.save import check_exportable, save_tokenizer_and_config, verify_export
from rlhf.model.task import Task
from rlhf.train.context import RunContext
from rlhf_devkit.gateways import build_gateways
from rlhf_devkit.plain import PlainBackend

EMBEDDING = ("embed_tokens", "q_proj")
FILE = "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write_model(tmp_path / "base", LlamaConfig(**SIZES, tie_word_embeddings=True))


def load(config: Config, task: Task = "causal") -> PackedModel:
    spec = ModelSpec(config=config, task=task)
    return load_model(spec, plan=Plan(precision="fp32"), mesh=Mesh(), hooks=None)


def trained(config: Config, task: Task = "causal") -> PackedModel:
    """A model whose adapter has an effect."""
    module = load(config, task)
    torch.manual_seed(3)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    module.path = "separate"
    return module


def export(module: PackedModel, folder: Path) -> Path:
    """Write what a backend gathers of an adapter: what is trained, and what peft has added."""
    weights = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad or "default" in name.split(".")
    }
    module.save_weights(weights, folder)
    save_tokenizer_and_config(module.model, chatml_tokenizer(), folder)
    verify_export(folder, module.model)
    return folder


def logits(causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 20)[None]).logits


@pytest.mark.parametrize("task", ["causal", "sequence"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_the_embedding_is_exported_merged_and_trained_further(
    tied: bool, dora: bool, task: Task, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "base", LlamaConfig(**SIZES, tie_word_embeddings=tied))
    module = trained(config_of(path, lora=LoraConfig(rank=2, dora=dora, targets=EMBEDDING)), task)
    expected = logits(module.model)
    adapter = export(module, tmp_path / "adapter")
    torch.testing.assert_close(logits(exported_model(adapter, task)), expected)
    again = load(config_of(path, model={"adapter": str(adapter)}), task)
    again.path = "separate"
    torch.testing.assert_close(logits(again.model), expected)
    merge_command(str(adapter), str(tmp_path / "merged"))
    merged = exported_model(tmp_path / "merged", task)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (task == "causal")


def test_head_and_embedding_that_are_adapted_together_are_merged(base: str, tmp_path: Path) -> None:
    settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    adapter = saved_by_peft(base, tmp_path / "adapter", **settings)
    weights = load_file(adapter / FILE)
    draw = torch.Generator().manual_seed(3)
    for name in [name for name in weights if "lora_" in name]:
        weights[name] = torch.randn(weights[name].shape, generator=draw) / 10
    save_file(weights, adapter / FILE)
    expected = logits(exported_model(adapter, "causal"))
    merge_command(str(adapter), str(tmp_path / "merged"))
    merged = exported_model(tmp_path / "merged", "causal")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_of_one_of_two_tied_matrices_is_merged(
    settings: dict[str, Any], base: str, tmp_path: Path
) -> None:
    adapter = saved_by_peft(base, tmp_path / "adapter", **settings)
    weights = load_file(adapter / FILE)
    draw = torch.Generator().manual_seed(3)
    for name in weights:
        weights[name] = torch.randn(weights[name].shape, generator=draw) / 10
    save_file(weights, adapter / FILE)
    expected = logits(exported_model(adapter, "causal"))
    merge_command(str(adapter), str(tmp_path / "merged"))
    merged = exported_model(tmp_path / "merged", "causal")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frozen", ["*lora_A*", "*lora_embedding_B*", "*mlp*"])
def test_an_adapter_of_which_a_part_is_frozen_is_exported(
    frozen: str, base: str, tmp_path: Path
) -> None:
    lora = LoraConfig(rank=2, targets=("embed_tokens", "q_proj", "up_proj"))
    config = config_of(base, lora=lora, model={"freeze": (frozen,)})
    check_exportable(empty(config).model)
    module = trained(config)
    adapter = export(module, tmp_path / "adapter")
    torch.testing.assert_close(logits(exported_model(adapter, "causal")), logits(module.model))


def saved_by_peft(base: str, folder: Path, **settings: Any) -> Path:
    """An adapter with settings that a run has not."""
    causal = AutoModelForCausalLM.from_pretrained(base)
    options = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(causal, options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "bias": "all"},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
    ],
    ids=str,
)
def test_what_is_rehearsed_of_an_adapter_is_what_is_exported(
    settings: dict[str, Any], base: str, tmp_path: Path
) -> None:
    folder = saved_by_peft(base, tmp_path / "adapter", **settings)
    config = config_of(base, model={"adapter": str(folder)})
    check_exportable(empty(config).model)
    export(load(config), tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"target_modules": ["q_proj"], "init_lora_weights": "olora"},
            "model.adapter {adapter} was initialized by olora, which may have changed the weights "
            "of its base; merge it into its base first with rlhf merge, and set lora to train a "
            "new adapter",
        ),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
            "model.adapter {adapter} adapts the output head, whose adapter would not affect the "
            "log-probabilities; choose another adapter",
        ),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_rehearsed_is_refused(
    settings: dict[str, Any], problem: str, base: str, tmp_path: Path
) -> None:
    adapter = saved_by_peft(base, tmp_path / "adapter", **settings)
    with pytest.raises(RLHFError) as error:
        empty(config_of(base, model={"adapter": str(adapter)}))
    assert str(error.value) == problem.format(adapter=adapter)


def test_an_adapter_of_which_peft_writes_only_a_part_is_refused_before_training(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = peft.utils.get_peft_model_state_dict

    def without_factors(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {n: v for n, v in whole(*args, **options).items() if "embedding_A" not in n}

    monkeypatch.setattr(peft.utils, "get_peft_model_state_dict", without_factors)
    hooks, _ = build_gateways(PlainBackend())
    config = config_of(base, lora=LoraConfig(rank=2, targets=EMBEDDING))
    run = RunContext(config=config, tokenizer=None, mesh=Mesh(), hooks=hooks, steps=1, longest=8)
    with pytest.raises(RLHFError) as error:
        run.load("policy")
    assert str(error.value) == (
        "the adapter of LlamaForCausalLM cannot be exported, because peft does not write "
        "base_model.model.model.embed_tokens.lora_embedding_A.default; change lora, or choose "
        "another model.adapter"
    )


@pytest.fixture
def adapter(base: str, tmp_path: Path) -> Path:
    return export(trained(config_of(base, lora=LoraConfig(rank=2))), tmp_path / "adapter")


def readers(base: str, adapter: Path) -> list[Any]:
    """The ways to load an adapter: to train it further, at stages 0 and 3, and to use it."""
    config = config_of(base, model={"adapter": str(adapter)})
    return [
        lambda: load_causal(config),
        lambda: load_causal(config, stage=3),
        lambda: exported_model(adapter, "causal"),
    ]


def change(adapter: Path, drop: str = "", **more: torch.Tensor) -> None:
    weights = load_file(adapter / FILE)
    weights = {name: value for name, value in weights.items() if name != drop}
    save_file(weights | more, adapter / FILE)


def test_a_weight_that_an_adapter_lacks_is_named(base: str, adapter: Path) -> None:
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    change(adapter, drop=name)
    for read in readers(base, adapter):
        with pytest.raises(RLHFError) as error:
            read()
        assert str(error.value) == (
            f"the adapter {adapter} has no weights for {name}; pass a complete adapter folder"
        )


def test_weights_that_no_parameter_takes_are_named(
    base: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"base_model.model.model.layers.{n}.mlp.up_proj.lora_A.weight" for n in (1, 2, 3)]
    change(adapter, "", **{name: torch.zeros(2, 32) for name in [*names, "other"]})
    for read in readers(base, adapter):
        capsys.readouterr()
        read()
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if line.startswith("warning")] == [
            f"warning: {adapter} has 3 weights that LlamaForCausalLM does not use: {names[1]}, "
            f"{names[2]} and other"
        ]


def peft_s_own(base: str, folder: Path, add: float) -> Path:
    """An adapter on the embedding as peft saves it: with the base's weights, of which one changed
    by `add`."""
    module = trained(config_of(base, lora=LoraConfig(rank=2, targets=EMBEDDING)))
    module.model.save_pretrained(folder)
    weights = load_file(folder / FILE)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    weights[name][0, 0] += add
    save_file(weights, folder / FILE)
    return folder


def test_an_adapter_with_copies_of_its_base_is_trained_further(base: str, tmp_path: Path) -> None:
    adapter = peft_s_own(base, tmp_path / "adapter", add=0)
    expected = logits(exported_model(adapter, "causal"))
    module = load_causal(config_of(base, model={"adapter": str(adapter)}))
    module.path = "separate"
    torch.testing.assert_close(logits(module.model), expected)


def test_an_adapter_with_another_base_inside_is_used_but_not_trained_further(
    base: str, tmp_path: Path
) -> None:
    adapter = peft_s_own(base, tmp_path / "adapter", add=1)
    exported_model(adapter, "causal")
    with pytest.raises(RLHFError) as error:
        load_causal(config_of(base, model={"adapter": str(adapter)}))
    assert str(error.value) == (
        f"the adapter {adapter} has other values of "
        "base_model.model.model.embed_tokens.base_layer.weight than its base, which the export of "
        "an adapter would lose; merge it with rlhf merge and train the merged model"
    )


def test_an_adapter_that_names_no_base_is_reported(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": None}
    file.write_text(json.dumps(settings))
    with pytest.raises(RLHFError) as error:
        exported_model(adapter, "causal")
    assert str(error.value) == (
        f"{adapter} names no base model; set base_model_name_or_path in its adapter_config.json"
    )


def test_a_base_that_lacks_weights_is_named_where_an_adapter_is_opened(
    base: str, adapter: Path
) -> None:
    file = Path(base) / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(RLHFError) as error:
        exported_model(adapter, "causal")
    assert str(error.value) == (
        f"the base model {base} of {adapter} has no weights for model.norm.weight of "
        "LlamaForCausalLM; restore it, or correct base_model_name_or_path in adapter_config.json"
    )
