"""Models that read images, trained on images: against plain transformers, one path at a time."""

import copy
from functools import cache, partial
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from engines import BareEngine
from image_families import (
    IMAGE_FAMILIES,
    PLACEHOLDER,
    example_with_images,
    from_config,
    image_model,
    path_inputs,
)
from torch import Tensor
from transformers import Llama4Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf.config.sections import Config, LoraConfig, ModelConfig, OptimConfig
from rlhf.data.example import Answer, Example
from rlhf.data.packing import pack
from rlhf.engine import Mesh
from rlhf.errors import RLHFError
from rlhf.model import attention
from rlhf.model.adapters import linear_modules
from rlhf.model.packed import PackedModel
from rlhf.model.parts import part_of
from rlhf.model.probe import choose_path
from rlhf.model.shape import shape_of
from rlhf.model.trainable import (
    parameter_groups,
    prepare_trainable,
    raise_if_rate_of_frozen,
    trained_parts,
)
from rlhf.readouts import token_logprobs
from rlhf_devkit.families import FAMILIES

MORE = partial(pytest.param, marks=pytest.mark.matrix)
LLAMA_4 = Llama4Config(
    text_config=FAMILIES["Llama 4"][1],
    vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
)


ROUNDING = {"Gemma 4 E2B": 5e-4}
"""Largest error of a gradient, as a share of the largest gradient. Those of transformers' Gemma 4
differ by 2.3e-4 from those in float64."""
QUICK = {"Qwen2.5-VL", "Qwen3-VL", "Qwen3.5", "LLaVA", "Gemma 3", "Gemma 4", "SmolVLM"}
NAMES = [name if name in QUICK else MORE(name) for name in IMAGE_FAMILIES]


def test_layers_of_towers_are_counted_beside_those_of_the_decoder() -> None:
    causal = copy.deepcopy(image_model("Qwen3-VL"))
    shape, vision = shape_of(PackedModel(causal)), causal.config.vision_config
    assert shape.tower_layers == vision.depth + len(vision.deepstack_visual_indexes)
    body = shape.parameters - shape.head - shape.lookup
    assert shape.mean_layer == body // (shape.layers + shape.tower_layers)


@cache
def examples_of(name: str) -> tuple[Example, ...]:
    """An image in a prompt with four answers, no image, three images, an image in an answer."""
    causal, draw = image_model(name), np.random.default_rng(3)
    return (
        example_with_images(name, causal, draw, 1, 0, 0, 0, 0, lengths=(6, 4, 3, 5, 2)),
        example_with_images(name, causal, draw, 0, 0, 0, lengths=(5, 4, 7)),
        example_with_images(name, causal, draw, 3, 0, lengths=(7, 5)),
        example_with_images(name, causal, draw, 1, 0, 2, lengths=(4, 3, 6)),
    )


def plain(name: str, causal: Any, example: Example, number: int) -> Tensor:
    """Return the log-probabilities of an answer by plain transformers, one path at a time."""
    own, answer = IMAGE_FAMILIES[name], example.answers[number].tokens
    path = torch.tensor([[*example.prompt, *answer]])
    inputs = path_inputs(example, number)
    if own.types:
        inputs[own.types] = (path == PLACEHOLDER).int()
    if not (path == PLACEHOLDER).any():
        inputs = {key: value for key, value in inputs.items() if key == own.types}
    logits = causal(input_ids=path, **inputs, use_cache=False).logits[0]
    predicting = logits[len(example.prompt) - 1 : -1].log_softmax(-1)
    return predicting.gather(1, torch.tensor(answer)[:, None])[:, 0]


def gradients(causal: Any, logprobs: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-1, 1, len(logprobs))
    causal.zero_grad()
    (weights * logprobs).sum().backward()
    return {n: p.grad.clone() for n, p in causal.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("path", ["tree", MORE("packed"), "padded", MORE("separate")])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1,)])
@pytest.mark.parametrize("name", NAMES)
def test_packed_images_have_plain_transformers_numbers(
    name: str, rows: tuple[int, ...], path: str
) -> None:
    if IMAGE_FAMILIES[name].path == "padded" and path in ("tree", "packed"):
        pytest.skip("its images attend in both directions")
    causal, examples = image_model(name), examples_of(name)
    expected = torch.cat(
        [
            plain(name, causal, examples[row], number)
            for row in rows
            for number in range(len(examples[row].answers))
        ]
    )
    truth = gradients(causal, expected)
    module = PackedModel(copy.deepcopy(causal), path=path)  # type: ignore[arg-type]
    batch = pack(examples, rows, round_to=16)
    found = module(batch, token_logprobs)["logprobs"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    own = gradients(module.model, found)
    largest = max(float(value.abs().max()) for value in truth.values())
    for key, value in own.items():
        atol = ROUNDING.get(name, 1e-4) * largest
        torch.testing.assert_close(
            value, truth.get(key, torch.zeros_like(value)), rtol=0, atol=atol
        )
    assert truth.keys() <= own.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_finds_the_best_path_on_images(name: str) -> None:
    engine = BareEngine(PackedModel(copy.deepcopy(image_model(name))))
    choice = choose_path(engine, Mesh(), image=examples_of(name)[3])  # type: ignore[arg-type]
    assert choice.path == IMAGE_FAMILIES[name].path, choice


def test_the_probe_compares_the_positions_of_the_data_with_the_models_own() -> None:
    example = examples_of("Qwen3-VL")[0]
    shifted = {**example.inputs, "position_ids": example.inputs["position_ids"][:, ::-1].copy()}
    engine = BareEngine(PackedModel(copy.deepcopy(image_model("Qwen3-VL"))))
    wrong = attrs.evolve(example, inputs=shifted)
    choice = choose_path(engine, Mesh(), image=wrong)  # type: ignore[arg-type]
    assert choice.path == "separate"
    assert choice.reason.startswith("padded was off by ")


def test_a_model_that_computes_images_and_logits_in_one_is_refused() -> None:
    causal = from_config(LLAMA_4)
    example = Example([90, 1], [Answer([2])], {}, {"pixel_values": np.zeros((1, 3, 8, 8))})
    with pytest.raises(RLHFError) as error:
        PackedModel(causal)(pack([example], [0]), token_logprobs)
    assert str(error.value) == (
        "Llama4ForConditionalGeneration computes images and logits in one module, so it can be "
        "trained only on text; remove the images from the data, or choose another model.path"
    )


def trained_names(name: str, *parts: Any, images: bool = True) -> set[str]:
    causal = copy.deepcopy(image_model(name))
    config = Config(model=ModelConfig(path="", train=parts or None))
    prepare_trainable(causal, config, "causal", images=images)
    return {key for key, value in causal.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("name", NAMES)
def test_the_named_parts_are_trained_on_images(name: str) -> None:
    language, projector, vision = (
        trained_names(name, part) for part in ("language", "projector", "vision")
    )
    everything = {key for key, _ in image_model(name).named_parameters()}
    assert language | projector | vision == everything
    assert len(language) + len(projector) + len(vision) == len(everything)
    assert trained_names(name) == language | projector
    assert trained_names(name, images=False) == language
    words = ("projector", "merger", "connector", "newline", "embed_vision")
    assert projector
    assert all(any(word in key for word in words) for key in projector)
    assert all("vis" in key for key in vision)


def test_adapters_are_on_the_language_part_and_on_parts_that_are_named() -> None:
    causal = image_model("Qwen3-VL")
    assert not [key for key in linear_modules(causal) if "visual" in key]
    projector = linear_modules(causal, ["projector"]).keys() - linear_modules(causal)
    assert {key.split(".")[2] for key in projector} == {"merger", "deepstack_merger_list"}
    vision = linear_modules(causal, ["vision"]).keys() - linear_modules(causal)
    assert {key.split(".")[2] for key in vision} == {"blocks"}
    assert trained_parts(Config(lora=LoraConfig())) == ("language",)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_parts_are_trained_with_rates_of_their_own(lora: LoraConfig | None) -> None:
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, part_lr={"vision": 1e-5, "projector": 1e-4})
    model = ModelConfig(path="", train=("language", "projector", "vision"))
    config = Config(model=model, optim=optim, lora=lora)
    causal = copy.deepcopy(image_model("Qwen3-VL"))
    module = PackedModel(prepare_trainable(causal, config, "causal", images=True))
    groups = parameter_groups(module, optim)
    rates = {item: group["lr"] for group in groups for item in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            vision = 1e-4 if "merger" in name else 1e-5
            assert rates.pop(parameter) == (vision if "visual" in name else 1e-3), name
    assert not rates
    # The run shows the rate of the first group.
    assert groups[0]["lr"] == 1e-3


def test_a_rate_of_a_part_that_is_frozen_is_refused() -> None:
    config = Config(optim=OptimConfig(part_lr={"projector": 1e-4}))
    raise_if_rate_of_frozen(config, images=True)
    with pytest.raises(RLHFError) as error:
        raise_if_rate_of_frozen(config, images=False)
    assert str(error.value) == (
        "optim.part_lr has a rate of projector, which is frozen here; remove it, or add projector "
        "to model.train and rows with images to data.train"
    )


def adapted(targets: Any, *parts: Any) -> set[str]:
    """The parts of a model that has adapters, by the first part of their modules' names."""
    own = LoraConfig(rank=2, targets=targets)
    config = Config(model=ModelConfig(path="", train=parts or None), lora=own)
    model = prepare_trainable(copy.deepcopy(image_model("Qwen3-VL")), config, "causal", images=True)
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    assert all("lora_" in name for name in names)
    return {part_of(name.removeprefix("base_model.model.model.")) for name in names}


def test_adapters_are_in_no_part_that_is_said_to_be_frozen() -> None:
    names = {key for key, _ in image_model("Qwen3-VL").named_modules()}
    assert any(key.endswith("language_model.layers.0.self_attn.q_proj") for key in names)
    assert {
        key.split(".")[1] for key in linear_modules(image_model("Qwen3-VL"), ["projector"])
    } == {"visual"}
    # `part_of` calls what is not a tower a projector.
    assert adapted("all-linear", "vision") == {"vision"}
    assert adapted(["q_proj", "qkv"], "language", "vision") == {"projector", "vision"}
    with pytest.raises(RLHFError) as error:
        adapted(["q_proj", "linear_fc2"])
    assert str(error.value) == (
        "lora.targets linear_fc2 names no module of the trained parts of "
        "Qwen3VLForConditionalGeneration; its linear modules: down_proj, gate_proj, k_proj, "
        "o_proj, q_proj, up_proj, v_proj"
    )
    assert adapted(["q_proj", "linear_fc2"], "language", "projector") == {"projector"}


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3-VL", "LLaVA"])
def test_all_images_of_a_row_are_one_call_where_the_tower_takes_their_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, own = [], attention.image_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[1].shape[2])
        return own(*args, **options)

    causal = copy.deepcopy(image_model(name))
    module = PackedModel(causal)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, attention.OF_IMAGES, counted)
    batch = pack(examples_of(name), [*range(len(examples_of(name)))])
    module.hidden(batch)
    patches = sum(len(it) for n, it in batch.inputs.items() if n == "pixel_values")
    assert calls == ([] if name == "LLaVA" else [patches] * len(causal.base_model.visual.blocks))
    module.path = "separate"
    module.hidden(batch)
    assert len(calls) == (0 if name == "LLaVA" else len(causal.base_model.visual.blocks))
