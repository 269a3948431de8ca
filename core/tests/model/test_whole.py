"""Models that also read images: opened as the class that the checkpoint names, trained on text."""

import json
from pathlib import Path
from typing import Any

import every_type
import pytest
import torch
import transformers
from engines import BareEngine, WholeWeights
from families import chatml_tokenizer
from safetensors.torch import load_file, save_file
from small_models import config_of, empty, load
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlhf.config.sections import LoraConfig, OptimConfig
from rlhf.engine import Mesh, Plan
from rlhf.errors import RLHFError, listed
from rlhf.model.load import load_model
from rlhf.model.packed import PackedModel
from rlhf.model.parts import beyond_text, decoder, language_model
from rlhf.model.probe import choose_path
from rlhf.model.role import ModelSpec
from rlhf.model.save import exported_shapes, save_tokenizer_and_config, verify_export
from rlhf.model.shape import empty_model
from rlhf.model.tokenizer import load_tokenizer
from rlhf.model.trainable import freeze_parts, parameter_groups
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES, SIZES, tree_batch

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
OPT = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
    "num_attention_heads": 4, "word_embed_proj_dim": 32,
}  # fmt: skip
QWEN_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
WHOLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "Gemma 3": (
        "Gemma3Config",
        {"text_config": FAMILIES["Gemma 3"][1], "vision_config": VISION}
        | {"mm_tokens_per_image": 4, "image_token_index": 90},
        "tree",
    ),
    "Mistral 3": (
        "Mistral3Config",
        {"text_config": SIZES | {"head_dim": 8, "model_type": "mistral"}, "image_token_index": 90}
        | {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}},
        "tree",
    ),
    "Qwen3-VL": (
        "Qwen3VLConfig",
        {"text_config": SIZES | {"head_dim": 8, "rope_parameters": ROPE}}
        | {"vision_config": QWEN_VISION}
        | TOKENS,
        "tree",
    ),
    "Qwen3.5": (
        "Qwen3_5Config",
        {
            "text_config": SIZES
            | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
            | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
            | {"layer_types": ["linear_attention", "full_attention"]},
            "vision_config": QWEN_VISION,
        }
        | TOKENS,
        "tree",
    ),
    "BLIP-2": (
        "Blip2Config",
        {"text_config": OPT | {"model_type": "opt"}, "vision_config": VISION}
        | {
            "qformer_config": {
                "vocab_size": 96,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "encoder_hidden_size": 16,
            },
            "image_token_index": 90,
        },
        "tree",
    ),
    "Llama 4": (
        "Llama4Config",
        {"text_config": FAMILIES["Llama 4"][1], "image_token_index": 90}
        | {
            "vision_config": VISION
            | {
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "intermediate_size": 64,
            }
        },
        "tree",
    ),
}
NO_PART = (
    "model.part text needs a model that also reads images, with a class of its own for text, "
    "which {path} is not; remove model.part"
)
TOWERS = ("vis", "projector", "qformer", "query_tokens", "language_projection")
"""In the names of what text does not reach."""


def written(folder: Path, name: str, **more: Any) -> Path:
    kind, options, _ = WHOLE[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(getattr(transformers, kind)(**options | more))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 8}')
    return folder


def opened(folder: Path, **sections: Any) -> PackedModel:
    return load(config_of(str(folder), **sections))


@pytest.mark.parametrize("name", WHOLE)
def test_text_is_packed_and_has_the_models_own_logprobs(tmp_path: Path, name: str) -> None:
    module = opened(written(tmp_path, name))
    choice = choose_path(BareEngine(module), Mesh())  # type: ignore[arg-type]
    assert choice.path == WHOLE[name][2], str(choice)
    batch = tree_batch()
    batch.tokens[batch.tokens >= 90] = 5
    found = module(batch, token_logprobs)["logprobs"]
    module.path = "separate"
    torch.testing.assert_close(found, module(batch, token_logprobs)["logprobs"])
    own = language_model(AutoModelForImageTextToText.from_pretrained(tmp_path))
    tokens = batch.tokens[None, :24]
    logits = own(input_ids=tokens).logits
    causal = language_model(module.causal)
    torch.testing.assert_close(causal(input_ids=tokens).logits, logits)


def test_a_tower_keeps_the_only_attention_that_it_has() -> None:
    if "apertus1p5" not in every_type.WHOLE:
        pytest.skip("transformers has no apertus1p5")
    with every_type.quiet():
        config = every_type.tiny_model("apertus1p5").config
        module = PackedModel(AutoModelForImageTextToText.from_config(config))
    for _ in range(2):
        module.path = "separate"
        assert config._attn_implementation == "sdpa"
        assert config.text_config._attn_implementation == "sdpa"
        assert config.vision_config._attn_implementation == "eager"
        module.path = "tree"
        assert config.text_config._attn_implementation == "rlhf_tree"


@pytest.mark.parametrize("name", WHOLE)
def test_what_text_does_not_reach_is_frozen_and_exported(tmp_path: Path, name: str) -> None:
    module = opened(written(tmp_path / "base", name))
    trained = {p for group in parameter_groups(module, OptimConfig()) for p in group["params"]}
    frozen = [n for n, p in module.causal.named_parameters() if p not in trained]
    assert frozen
    assert all(any(part in name for part in TOWERS) for name in frozen)
    with torch.no_grad():
        for parameter in trained:
            parameter += 1.0
    module.save_weights(module.state_dict(), tmp_path / "export")
    verify_export(tmp_path / "export", module.model)
    base, export = (load_file(tmp_path / part / "model.safetensors") for part in ("base", "export"))
    assert base.keys() == export.keys()
    moved = {name for name in base if not torch.equal(base[name], export[name])}
    assert not [name for name in moved if any(part in name for part in TOWERS)]
    assert len(moved) == len(base) - len(frozen)
    model, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert type(model) is type(module.causal)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_the_names_of_the_base_are_kept_where_another_rank_or_no_one_reads_it(
    prefix: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, "Gemma 3")
    weights = {
        name.replace("vision_tower.", f"vision_tower.{prefix}"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = config_of(str(folder))
    for module in (load(config), load(config, stage=3), empty(config)):
        assert exported_shapes(module.model).keys() == weights.keys()


def test_the_export_has_the_files_that_prepare_images(tmp_path: Path) -> None:
    module = opened(written(tmp_path / "base", "Gemma 3"))
    (tmp_path / "export").mkdir()
    save_tokenizer_and_config(module.model, chatml_tokenizer(), tmp_path / "export")
    assert json.loads((tmp_path / "export" / "preprocessor_config.json").read_text()) == {"size": 8}


def test_the_export_reads_images_as_its_base_does(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="the processor of images needs Pillow")
    tokenizer = chatml_tokenizer(
        extra_special_tokens={"boi_token": "<b>", "eoi_token": "<e>", "image_token": "<i>"}
    )
    base, export = tmp_path / "base", tmp_path / "export"
    written(base, "Gemma 3", image_token_index=tokenizer.image_token_id)
    images = transformers.Gemma3ImageProcessor(size={"height": 8, "width": 8})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(base)
    module = opened(base)
    module.save_weights(module.state_dict(), export)
    save_tokenizer_and_config(module.model, load_tokenizer(config_of(str(base))), export)
    picture = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
    rows, logits = [], []
    for folder in (base, export):
        processor = AutoProcessor.from_pretrained(folder)
        inputs = processor(text=["a <b> a"], images=[[picture]], return_tensors="pt")
        rows.append(inputs["input_ids"].tolist())
        model = AutoModelForImageTextToText.from_pretrained(folder)
        logits.append(model(**inputs).logits)
    assert rows[0] == rows[1]
    assert rows[0][0].count(tokenizer.image_token_id) == 4
    assert torch.equal(*logits)


def test_only_the_text_part_is_trained_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = opened(written(tmp_path, "Qwen3.5"), model={"part": "text"})
    assert type(module.causal).__name__ == "Qwen3_5ForCausalLM"
    vision = [name for name in load_file(tmp_path / "model.safetensors") if "visual" in name]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: {tmp_path} has {len(vision)} weights that Qwen3_5ForCausalLM does not use: "
        f"{listed(sorted(vision))}"
    )


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        ("Mistral 3", {}, NO_PART),
        # AutoModelForCausalLM opens the whole model.
        ("Gemma 3", {}, NO_PART),
        (
            "Qwen3.5",
            {"lora": LoraConfig()},
            "model.part text cannot be combined with an adapter, whose base is the whole model; "
            "remove model.part",
        ),
    ],
)
def test_a_part_that_cannot_be_had_is_refused(
    tmp_path: Path, name: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(RLHFError) as caught:
        opened(written(tmp_path, name), model={"part": "text"}, **sections)
    assert str(caught.value) == message.format(path=tmp_path)


def test_weights_of_parts_that_the_class_lacks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, "Qwen3.5")
    weights = load_file(folder / "model.safetensors")
    weights["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(2, 2)
    weights["mtp.norm.weight"] = torch.zeros(2)
    weights["model.language_model.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    opened(folder)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"warning: {folder} has 2 weights that Qwen3_5ForConditionalGeneration does not use: "
        "mtp.layers.0.mlp.gate_proj.weight and mtp.norm.weight"
    )


def test_a_model_without_a_decoder_for_text_alone_is_refused(tmp_path: Path) -> None:
    config = transformers.Pix2StructConfig(
        text_config={"num_layers": 1, "hidden_size": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16},
        vision_config=VISION,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RLHFError) as caught:
        empty(config_of(str(tmp_path)))
    assert str(caught.value) == (
        f"model.path {tmp_path} is Pix2StructForConditionalGeneration, which has no decoder and "
        "head for text alone; choose a model with a causal language model in it"
    )


def test_a_classifier_on_a_model_that_reads_images_is_opened_again(tmp_path: Path) -> None:
    path, texts = written(tmp_path / "base", "Gemma 3"), []
    for number in range(2):
        spec = ModelSpec(config=config_of(str(path)), task="sequence", labels=1)
        empty_model(spec, Mesh())
        module = load_model(spec, plan=Plan(precision="fp32"), mesh=Mesh(), hooks=WholeWeights())
        choice = choose_path(BareEngine(module), Mesh())  # type: ignore[arg-type]
        texts.append((type(decoder(module.causal)).__name__, choice.path))
        path = tmp_path / f"export {number}"
        module.save_weights(module.state_dict(), path)
        save_tokenizer_and_config(module.model, chatml_tokenizer(), path)
    assert texts == [("Gemma3TextModel", "tree")] * 2


def test_nothing_of_a_model_of_text_is_beyond_text() -> None:
    causal = AutoModelForCausalLM.from_config(transformers.OPTConfig(**OPT))
    # A decoder that is only a part of what text reaches, as of byte-level models.
    causal.model.get_decoder = causal.get_decoder = lambda: causal.model.decoder.layers[0]
    assert beyond_text(causal) == []


@pytest.mark.parametrize("model_type", ["phi4_multimodal", "moss_transcribe_diarize", "git"])
def test_towers_of_a_model_of_text_are_frozen(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    with every_type.quiet():
        causal = every_type.tiny_model(model_type)
    freeze_parts(causal, ["language"])
    causal(input_ids=torch.arange(8)[None] + 3, use_cache=False).logits.sum().backward()
    for name, parameter in causal.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name
