"""A head that its config.json ties to the embedding although its weights differ: it is kept where
models are loaded, counted and written."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SIZES, config_of, empty, load, write_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    SiglipVisionConfig,
)

from rlhf.commands.merge import merge_command
from rlhf.commands.records import export_command
from rlhf.config.sections import LoraConfig
from rlhf.errors import RLHFError
from rlhf.model import stored
from rlhf.model.exported import exported_model
from rlhf.model.packed import PackedModel
from rlhf.model.save import verify_export
from rlhf.model.shape import shape_of
from rlhf_devkit import tiny

TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
HEAD = "lm_head.weight"
TEXT = Gemma3TextConfig(**SIZES, head_dim=16, tie_word_embeddings=True)
VISION = SiglipVisionConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    image_size=8, patch_size=4,
)  # fmt: skip
FAMILIES = {
    "llama": TIED,
    "gpt2": GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2),
    "config inside a config": Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4
    ),
}


def another_head(folder: Path, values: torch.Tensor | None = None) -> None:
    """Add a head to a folder, whose config ties it: `values`, or new ones."""
    (file,) = folder.glob("model.safetensors")
    weights = load_file(file)
    ends = (".wte.weight", ".embed_tokens.weight")
    (embedding,) = (value for name, value in weights.items() if name.endswith(ends))
    new = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5))
    # Gemma 3 is stored with the names of an older transformers.
    head = f"language_model.{HEAD}" if "language_model.model.norm.weight" in weights else HEAD
    save_file({**weights, head: new if values is None else values}, file, {"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = Path(write_model(tmp_path / "model", TIED))
    another_head(folder)
    return folder


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("warning")]


def logits(causal: Any) -> torch.Tensor:
    with torch.no_grad():
        return causal.eval()(input_ids=torch.arange(3, 20)[None]).logits


def logits_in(folder: Path | str) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def check_kept(folder: Path, **options: Any) -> None:
    """Check that all ways of loading have the head, that it is counted, and that it is written."""
    expected = logits_in(folder)
    module = load(config_of(str(folder)), **options)
    module.path = "separate"
    assert torch.equal(logits(module.causal), expected)
    parameters = sum(value.numel() for value in module.parameters())
    assert shape_of(empty(config_of(str(folder)))).parameters == parameters
    target = folder.parent / "written"
    module.save_weights(module.state_dict(), target)
    verify_export(target, module.model)
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    torch.testing.assert_close(logits_in(target), expected)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_the_config_denies_is_kept(family: str, stage: int, tmp_path: Path) -> None:
    folder = Path(write_model(tmp_path / "model", FAMILIES[family]))
    another_head(folder)
    check_kept(folder, stage=stage)


@pytest.mark.parametrize("kind", ["shards", "torch", "half of it in 16 bits"])
def test_a_head_is_found_in_files_of_every_kind(kind: str, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    if kind == "shards":
        causal = AutoModelForCausalLM.from_pretrained(model)
        causal.config.tie_word_embeddings = False
        (model / "model.safetensors").unlink()
        causal.save_pretrained(model, max_shard_size="8KB")
        causal.config.tie_word_embeddings = True
        causal.config.save_pretrained(model)
        assert len([*model.glob("model-*.safetensors")]) > 2
    elif kind == "torch":
        (model / "model.safetensors").unlink()
        torch.save(weights, model / "pytorch_model.bin")
    else:
        save_file(weights | {HEAD: weights[HEAD].bfloat16()}, model / "model.safetensors")
    check_kept(model, stage=3)


def test_an_equal_copy_of_the_embedding_stays_tied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(write_model(tmp_path / "model", TIED))
    before = logits_in(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    another_head(folder, embedding.clone())
    module = load(config_of(str(folder)), stage=3)
    assert module.causal.lm_head.weight is module.causal.model.embed_tokens.weight
    module.path = "separate"
    assert torch.equal(logits(module.causal), before)
    assert warnings(capsys) == []


def test_a_head_under_only_one_of_two_names_is_tied(tmp_path: Path) -> None:
    folder = Path(write_model(tmp_path / "model", TIED))
    before = logits_in(folder)
    weights = load_file(folder / "model.safetensors")
    weights[HEAD] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for stage in (0, 3):
        module = load(config_of(str(folder)), stage=stage)
        module.path = "separate"
        assert torch.equal(logits(module.causal), before)


def test_a_separate_head_is_reported_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        empty(config_of(str(model)))
        load(config_of(str(model)), stage=3)
    assert warnings(capsys) == [
        f"warning: {model} has model.embed_tokens.weight and lm_head.weight with different values "
        "although its config.json ties them; they are separate weights here and in what is exported"
    ]


def test_new_weights_are_tied_as_the_config_says(model: Path) -> None:
    module = load(config_of(str(model), model={"init": "random"}))
    assert module.causal.lm_head.weight is module.causal.model.embed_tokens.weight


def test_only_headers_are_read_of_a_model_that_has_not_been_downloaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = load_file(model / "model.safetensors").keys()
    monkeypatch.setattr(
        stored,
        "get_safetensors_metadata",
        lambda name, revision: Metadata(dict.fromkeys(names, "model.safetensors")),
    )
    asked = []

    def download(name: str, file: str, revision: str | None) -> Path:
        asked.append((name, file, revision))
        return model / file

    monkeypatch.setattr(stored, "cached_file", download)
    weights = stored.stored_weights("org/model", "main")
    assert (weights.keys(), asked) == (names, [])
    assert torch.equal(weights[HEAD], load_file(model / "model.safetensors")[HEAD])
    assert asked == [("org/model", "model.safetensors", "main")]


class Metadata:
    """What the hub says of a model."""

    def __init__(self, weight_map: dict[str, str]) -> None:
        self.weight_map = weight_map


@pytest.mark.parametrize("stage", [0, 3])
def test_a_head_in_a_file_that_is_not_read_before_loading_is_refused(
    stage: int, model: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(RLHFError) as error:
        load(config_of(str(model)), stage=stage)
    assert str(error.value) == (
        f"{model} has model.embed_tokens.weight and lm_head.weight with different values although "
        "its config.json ties them; set tie_word_embeddings to false in its config.json"
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_config_that_unties_weights_needs_both(stage: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TIED)
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    config.save_pretrained(folder)
    with pytest.raises(RLHFError) as error:
        load(config_of(folder), stage=stage)
    assert str(error.value) == (
        f"{folder} has no weights for lm_head.weight of LlamaForCausalLM: model.path must be a "
        "complete causal language model"
    )


@pytest.mark.parametrize("base_is_here", [True, False])
def test_the_export_of_a_checkpoint_has_the_head(
    base_is_here: bool, tmp_path: Path, cache: Path
) -> None:
    words = tiny.short_run(tmp_path, "demonstration")
    base, run = tmp_path / "model", tmp_path / "run"
    another_head(base)
    expected = logits_in(base)
    more = ("--train.steps", "1", "--optim.lr", "1e-12", "--output", str(run))
    tiny.run("sft", [*words, *more], str(cache), plain=True)
    if not base_is_here:
        (base / "model.safetensors").unlink()
    export_command(str(run), str(tmp_path / "out"))
    for folder in (run / "model", tmp_path / "out"):
        torch.testing.assert_close(logits_in(folder), expected)
        assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_an_adapter_of_such_a_base_is_merged_into_both_weights(model: Path, tmp_path: Path) -> None:
    module = load(config_of(str(model), lora=LoraConfig(rank=2)))
    changed(module)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    module.save_weights(module.state_dict(), adapter)
    module.path = "separate"
    torch.testing.assert_close(logits(exported_model(adapter, "causal")), logits(module.causal))
    merge_command(str(adapter), str(merged))
    torch.testing.assert_close(logits_in(merged), logits(module.causal), rtol=1e-3, atol=1e-4)
    assert not json.loads((merged / "config.json").read_text())["tie_word_embeddings"]


def changed(module: PackedModel) -> None:
    """Give the adapter of a module an effect."""
    draw = partial(torch.nn.init.normal_, std=0.2, generator=torch.Generator().manual_seed(3))
    for name, parameter in module.named_parameters():
        if "lora_" in name and parameter.requires_grad:
            draw(parameter)
