"""Classifiers on a language model's backbone: loading, heads, adapters, scores, export."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import BareEngine, WholeWeights
from families import chatml_tokenizer
from peft import PeftModel
from small_models import SIZES
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from rlhf.commands.merge import merge_command
from rlhf.config.sections import Config, LoraConfig, ModelConfig, TrainConfig
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError
from rlhf.model.head import read_head
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel
from rlhf.model.probe import AttentionPath, choose_path
from rlhf.model.role import ModelSpec
from rlhf.model.save import save_tokenizer_and_config, verify_export
from rlhf.model.shape import empty_model, shape_of
from rlhf.model.task import check_classifier
from rlhf.model.tokenizer import with_padding
from rlhf.readouts import scores, token_scores

CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=4),
    "gpt2": GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=2),
}
CLASSES = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
LABELS = {"sequence": 1, "token": 2}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of language models."""
    folder = tmp_path_factory.mktemp("bases")
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in CONFIGS}


def load(path: str, task: Any, *, stage: int = 0, **sections: Any) -> PackedModel:
    config = Config(model=ModelConfig(path=path, **sections.pop("model", {})), **sections)
    plan = Plan(sharded=stage == 3, precision="fp32")
    spec = ModelSpec(config=config, task=task)
    return load_model(spec, plan=plan, mesh=Mesh(), hooks=WholeWeights()).eval()


def trees() -> Any:
    """Two prompts with two answers and one."""
    return pack(
        [
            Example([3, 20, 6, 7], [Answer([8, 9, 10]), Answer([11, 12, 13, 14, 15])]),
            Example([16, 17], [Answer([18, 19])]),
        ],
        [0, 1],
    )


PATHS = ([3, 20, 6, 7, 8, 9, 10], [3, 20, 6, 7, 11, 12, 13, 14, 15], [16, 17, 18, 19])


def padded(pad: int, side: str) -> dict[str, torch.Tensor]:
    """The same paths as a batch for transformers."""
    longest = max(map(len, PATHS))
    fill = [[pad] * (longest - len(path)) for path in PATHS]
    rows = [f + p if side == "left" else p + f for f, p in zip(fill, PATHS, strict=True)]
    tokens = torch.tensor(rows)
    return {"input_ids": tokens, "attention_mask": (tokens != pad).long()}


@pytest.mark.parametrize("task", ["sequence", "token"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_backbone_is_the_language_models_and_the_head_depends_only_on_the_seed(
    family: str, task: str, bases: dict[str, str]
) -> None:
    torch.rand(3)
    before = torch.get_rng_state()
    module = load(bases[family], task)
    assert torch.equal(before, torch.get_rng_state())
    sharded = load(bases[family], task, stage=3)
    other = load(bases[family], task, train=TrainConfig(seed=1))
    base = AutoModelForCausalLM.from_pretrained(bases[family]).base_model.state_dict()
    for name, weight in module.causal.base_model.state_dict().items():
        assert torch.equal(weight, base[name]), name
    heads = [read_head(found.causal) for found in (module, sharded, other)]
    assert heads[0].weight.shape == (LABELS[task], 32)
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert heads[0].bias is None or not heads[0].bias.any()
    config = Config(model=ModelConfig(path=bases[family]))
    assert shape_of(empty_model(ModelSpec(config=config, task=task), Mesh())).parameters == sum(  # type: ignore[arg-type]
        parameter.numel() for parameter in module.parameters()
    )


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("task", ["sequence", "token"])
def test_a_classifier_that_is_trained_further_keeps_its_head(
    task: str, stage: int, bases: dict[str, str], tmp_path: Path
) -> None:
    module = load(bases["llama"], task, train=TrainConfig(seed=7))
    module.save_weights(module.state_dict(), tmp_path)
    again = load(str(tmp_path), task, stage=stage)
    assert torch.equal(read_head(again.causal).weight, read_head(module.causal).weight)


@pytest.mark.parametrize("task", ["sequence", "token"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_probe_chooses_tree_attention_for_classifiers(
    family: str, task: str, bases: dict[str, str]
) -> None:
    engine: Any = BareEngine(load(bases[family], task))
    assert choose_path(engine, Mesh(), longest=60) == AttentionPath(path="tree", reason="")


def test_the_probe_finds_a_head_that_is_more_than_a_linear_layer(bases: dict[str, str]) -> None:
    module = load(bases["llama"], "sequence")
    inner = module.causal.score.forward
    module.causal.score.forward = lambda hidden: inner(torch.tanh(hidden))
    with pytest.raises(RLHFError, match="the logits of LlamaForSequenceClassification are not"):
        choose_path(BareEngine(module), Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("family", CONFIGS)
def test_exported_scores_are_those_of_the_trees_for_any_padding(
    family: str, lora: Any, bases: dict[str, str], tmp_path: Path
) -> None:
    module = load(bases[family], "sequence", lora=lora)
    stir(module)
    module.path = "tree"
    with torch.no_grad():
        own = module(trees(), scores)["scores"]
    export(module, tmp_path)
    model, pad = opened(tmp_path, AutoModelForSequenceClassification, bases[family], lora)
    assert pad not in (1, 2, None)
    sides = ("left", "right") if family == "llama" else ("right",)
    for side in sides:
        with torch.no_grad():
            rewards = model(**padded(pad, side)).logits.squeeze(-1)
        torch.testing.assert_close(rewards, own, atol=1e-5, rtol=1e-5)
    for path, reward in zip(PATHS, own, strict=True):
        with torch.no_grad():
            single = model(input_ids=torch.tensor([path])).logits.squeeze()
        torch.testing.assert_close(single, reward, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("family", CONFIGS)
def test_exported_token_scores_are_those_of_the_trees(
    family: str, lora: Any, bases: dict[str, str], tmp_path: Path
) -> None:
    module = load(bases[family], "token", lora=lora)
    stir(module)
    module.path = "tree"
    with torch.no_grad():
        own = module(trees(), token_scores)["scores"]
    export(module, tmp_path)
    model, pad = opened(tmp_path, AutoModelForTokenClassification, bases[family], lora)
    with torch.no_grad():
        found = model(**padded(pad, "right")).logits
    torch.testing.assert_close(found[0, :7], own[:7], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1, 4:9], own[7:12], atol=1e-5, rtol=1e-5)


def stir(module: PackedModel) -> None:
    """Other values for whatever is trained, the head among it."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)


def export(module: PackedModel, folder: Path) -> None:
    """As a run does; the tokenizer's only padding is its EOS."""
    module.save_weights(module.state_dict(), folder)
    save_tokenizer_and_config(module.model, padded_by_eos(), folder, {"reward_mean": 0.5})
    verify_export(folder, module.model)
    assert AutoConfig.from_pretrained(folder).reward_mean == 0.5


def padded_by_eos() -> Any:
    found = chatml_tokenizer()
    found.pad_token = found.eos_token
    return found


def opened(folder: Path, kind: Any, base: str, lora: Any) -> tuple[Any, int]:
    """The exported model in plain transformers or peft, and its padding token."""
    config = AutoConfig.from_pretrained(folder)
    pad = AutoTokenizer.from_pretrained(folder).pad_token_id
    assert config.pad_token_id == pad
    if lora is None:
        return kind.from_pretrained(folder).eval(), pad
    model = kind.from_pretrained(base, config=config)
    return PeftModel.from_pretrained(model, folder).eval(), pad


@pytest.mark.parametrize("task", ["sequence", "token"])
def test_an_adapter_trains_and_keeps_the_head_and_merges_with_it(
    task: str, bases: dict[str, str], tmp_path: Path
) -> None:
    module = load(bases["llama"], task, lora=LoraConfig(rank=2))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert any("score.modules_to_save.default.weight" in name for name in trained)
    assert not any("score" in name and "lora" in name for name in trained)
    stir(module)
    export(module, tmp_path / "adapter")
    again = load(bases["llama"], task, model={"adapter": str(tmp_path / "adapter")})
    assert torch.equal(read_head(again.causal).weight, read_head(module.causal).weight)
    assert read_head(again.causal).weight.requires_grad
    merge_command(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged = CLASSES[task].from_pretrained(tmp_path / "merged").eval()
    module.path = again.path = "separate"
    tokens = torch.tensor([PATHS[1]])
    with torch.no_grad():
        own = module.causal(input_ids=tokens).logits
        torch.testing.assert_close(merged(input_ids=tokens).logits, own, atol=1e-5, rtol=1e-5)


def test_the_logits_of_some_tokens_are_those_of_the_whole_vocabulary(
    bases: dict[str, str],
) -> None:
    module = load(bases["llama"], "causal")
    chosen = torch.tensor([7, 30])
    with torch.no_grad():
        some = module(trees(), lambda *args: token_scores(*args, tokens=chosen))["scores"]
        whole = module(trees(), token_scores)["scores"]
    torch.testing.assert_close(some, whole[:, chosen])


def failing(path: str, task: str, **sections: Any) -> str:
    with pytest.raises(RLHFError) as caught:
        load(path, task, **sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_family_without_the_class_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    GraniteConfig(**SIZES).save_pretrained(tmp_path)
    assert failing(str(tmp_path), "sequence") == (
        "transformers has no AutoModelForSequenceClassification for granite "
        f"(model.path {tmp_path}); choose a family that has one, such as llama, qwen3 or mistral"
    )
    assert failing(str(tmp_path), "token") == (
        f"transformers has no AutoModelForTokenClassification for granite (model.path {tmp_path}); "
        "choose a family that has one, such as llama, qwen3 or mistral"
    )


def test_a_family_with_images_without_the_class_is_refused_with_one_that_has_it() -> None:
    vision = Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"])
    with pytest.raises(RLHFError) as caught:
        check_classifier(vision, "sequence", ("reward",), "org/model")
    assert str(caught.value) == (
        "transformers has no AutoModelForSequenceClassification for qwen3_vl "
        "(model.path org/model); choose a family that has one, such as qwen3_5"
    )
    other = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    for task in ("sequence", "token"):
        check_classifier(other, task, ("reward",), "org/model")


def test_a_classifier_of_another_kind_is_refused(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=5)).save_pretrained(tmp_path)
    assert failing(str(tmp_path), "sequence") == (
        f"model.path {tmp_path} is LlamaForSequenceClassification with 5 labels, but this "
        "trainer's head has 1 (reward); choose the language model it was trained from"
    )
    assert failing(str(tmp_path), "token") == (
        f"model.path {tmp_path} is LlamaForSequenceClassification, whose head is not "
        "for TokenClassification; choose the language model it was trained from"
    )


def test_a_classifier_without_its_head_is_refused(bases: dict[str, str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["llama"])
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, num_labels=1)
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(tmp_path)
    assert failing(str(tmp_path), "sequence").startswith(
        f"{tmp_path} has no weights for score.weight of LlamaForSequenceClassification: "
    )


def test_an_adapter_of_another_task_is_refused(bases: dict[str, str], tmp_path: Path) -> None:
    module = load(bases["llama"], "causal", lora=LoraConfig(rank=2))
    module.save_weights(module.state_dict(), tmp_path)
    assert failing(bases["llama"], "sequence", model={"adapter": str(tmp_path)}) == (
        f"model.adapter {tmp_path} was trained for CAUSAL_LM, but this trainer needs SEQ_CLS; "
        "choose another adapter, or merge it into its base first"
    )


def test_a_padding_token_ends_no_answer() -> None:
    own = chatml_tokenizer()
    assert with_padding(own, 40).pad_token_id == own.pad_token_id
    assert with_padding(padded_by_eos(), 40).pad_token == "<|pad|>"
    full = padded_by_eos()
    full.unk_token = "a"
    assert with_padding(full, len(full)).pad_token == "a"
    assert full.pad_token == full.eos_token, "the run's own tokenizer is not changed"


def test_a_tokenizer_without_any_other_token_to_pad_with_is_reported() -> None:
    bare = Tokenizer(models.WordLevel({"<e>": 0, "a": 1}, unk_token="<e>"))
    found = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<e>", pad_token="<e>")
    with pytest.raises(RLHFError) as caught:
        with_padding(found, 2)
    assert str(caught.value) == (
        "the tokenizer's only padding token '<e>' ends answers, and the embedding has no row for "
        "another: set pad_token in its tokenizer_config.json to a token that no answer ends with"
    )


def test_importing_tasks_needs_no_backend() -> None:
    code = "import sys, rlhf.model.task; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
