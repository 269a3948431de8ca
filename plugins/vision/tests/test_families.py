"""What a model gets of a row equals what the processor of its checkpoint returns for the same
messages in plain transformers, for each path of the tree."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_rows import prepared, tokens_of
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import FAMILIES, picture

from rlhf.plugin import ModelConfig
from rlhf.trainer import Example
from rlhf_vision.processor import load_processor
from rlhf_vision.reader import joined

SIZES = ((40, 30), (20, 50), (33, 17))
QUICK = ("qwen2_5_vl", "gemma3")
WITH_TORCHVISION = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")
MARKS = {name: [WITH_TORCHVISION] for name in ("mistral3", "lfm2_vl")}
ALL = [pytest.param(name, id=name, marks=MARKS.get(name, [])) for name in FAMILIES]
MOST = [
    pytest.param(
        name,
        id=name,
        marks=[*MARKS.get(name, []), *([] if name in QUICK else [pytest.mark.matrix])],
    )
    for name in FAMILIES
]
TOKEN_INPUTS = ("mm_token_type_ids", "token_type_ids", "position_ids")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    # SmolVLM's processor asks for it, for videos.
    monkeypatch.setattr(
        "transformers.models.smolvlm.processing_smolvlm.num2words", str, raising=False
    )


@pytest.fixture
def pictures(tmp_path: Path) -> list[Image.Image]:
    made = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
    for number, each in enumerate(made):
        each.save(tmp_path / f"{number}.png")
    return made


def talk(question: str, count: int) -> dict[str, Any]:
    parts = [{"type": "image"}] * count
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def plain(model: Path, messages: Sequence[Mapping[str, Any]], images: list[Image.Image]) -> Any:
    """What transformers returns for messages with these images."""
    left = iter(images)
    filled = [
        {**message, "content": [
            {**part, "image": next(left)} if part["type"] == "image" else part
            for part in message["content"]
        ]} for message in messages
    ]  # fmt: skip
    processor = load_processor(ModelConfig(path=str(model)))
    if "SmolVLM" in str(type(processor).__mro__):
        # That of SmolVLM asks for settings of videos.
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
    return processor.apply_chat_template(
        filled, tokenize=True, return_dict=True, return_tensors="pt"
    )


def check_path(
    example: Example, answer: int, expected: Any, arrays: Mapping[str, NDArray[Any]], model: Path
) -> None:
    """Compare a path, with the `arrays` of its images, with the processor's."""
    path = tokens_of(example, answer)
    ids = expected["input_ids"][0].tolist()
    # Core leaves out what follows the last turn.
    assert path == ids[: len(path)] or path[: len(ids)] == ids
    size = min(len(ids), len(path))
    assert size > 0.9 * len(path)
    others = {"input_ids", "attention_mask", *TOKEN_INPUTS}
    assert {*arrays} - {*TOKEN_INPUTS, "segment_rows"} == {*expected} - others
    for name in {*expected} - others:
        np.testing.assert_array_equal(arrays[name], expected[name].numpy())
    for name in {*expected}.intersection(TOKEN_INPUTS):
        np.testing.assert_array_equal(
            of_path(example, name, answer)[:size], expected[name][0][:size].numpy()
        )
    config = AutoConfig.from_pretrained(model)
    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    with torch.device("meta"):
        base = rope_of(kind, config)
    assert (base is not None) == ("position_ids" in example.inputs)
    if base is not None:
        positions, _ = base(
            input_ids=expected["input_ids"], image_grid_thw=expected.get("image_grid_thw"),
            mm_token_type_ids=expected["mm_token_type_ids"],
        )  # fmt: skip
        np.testing.assert_array_equal(
            of_path(example, "position_ids", answer)[:size], positions[:, 0].T[:size].numpy()
        )


def rope_of(kind: Any, config: Any) -> Any:
    """The model's own rule of positions, of a model with one small layer of each kind."""
    if not config.model_type.startswith(("qwen", "glm")):
        return None
    text = config.text_config
    text.num_hidden_layers, text.layer_types = 1, ["full_attention"]
    config.vision_config.depth = 1
    return kind(config).model.get_rope_index


def of_path(example: Example, name: str, answer: int) -> NDArray[Any]:
    """An input per token, of the prompt and one answer."""
    ends = np.cumsum([len(example.prompt), *(len(each.tokens) for each in example.answers)])
    array = example.inputs[name]
    return np.concatenate([array[: ends[0]], array[ends[answer] : ends[answer + 1]]])


@pytest.mark.parametrize("family", ALL)
def test_a_conversation_with_images_in_several_turns(
    family: str, tmp_path: Path, pictures: list[Image.Image]
) -> None:
    model = FAMILIES[family](tmp_path / "model")
    messages = [talk("Which two?", 2), said("these"), talk("And this?", 1), said("that")]
    row = {"messages": messages, "images": ["0.png", "1.png", "2.png"]}
    (example,) = prepared(model, [row], tmp_path).train
    check_path(example, 0, plain(model, messages, pictures), example.inputs, model)


@pytest.mark.parametrize("family", MOST)
def test_a_prompt_with_images_has_them_once_for_both_answers(
    family: str, tmp_path: Path, pictures: list[Image.Image]
) -> None:
    model = FAMILIES[family](tmp_path / "model")
    row: dict[str, Any] = {
        "prompt": [talk("Which?", 2)], "chosen": [said("the first")], "rejected": [said("none")],
        "images": ["0.png", "1.png"],
    }  # fmt: skip
    (example,) = prepared(model, [row], tmp_path, "dpo").train
    for number, answer in enumerate(("chosen", "rejected")):
        messages = [*row["prompt"], *row[answer]]
        check_path(example, number, plain(model, messages, pictures[:2]), example.inputs, model)


@pytest.mark.parametrize("family", [each for each in MOST if each.id != "llava_onevision"])
def test_an_answer_may_have_images_of_its_own(
    family: str, tmp_path: Path, pictures: list[Image.Image]
) -> None:
    model = FAMILIES[family](tmp_path / "model")
    row: dict[str, Any] = {
        "prompt": [talk("Look.", 1)],
        "chosen": [said("I see"), talk("And?", 1), said("a")],
        "rejected": [said("no"), talk("Well?", 1), said("b")],
        "images": ["0.png", "1.png", "2.png"],
    }
    (example,) = prepared(model, [row], tmp_path, "dpo").train
    inputs = dict(example.inputs)
    rows, names = (
        inputs.pop("segment_rows"),
        sorted({*inputs}.difference(TOKEN_INPUTS, ["segment_rows"])),
    )
    ends = np.cumsum([np.zeros(len(names), int), *rows], axis=0)
    for number, answer in enumerate(("chosen", "rejected")):
        part = {}
        for column, name in enumerate(names):
            start, stop = ends[number + 1][column], ends[number + 2][column]
            part[name] = np.concatenate([inputs[name][: ends[1][column]], inputs[name][start:stop]])
        if family == "smolvlm":  # The images of a sample are one row, which the model flattens.
            part = {name: array.reshape(1, -1, *array.shape[2:]) for name, array in part.items()}
            kept = np.asarray(part["pixel_attention_mask"].any((2, 3)))[0]
            part = {name: array[:, kept] for name, array in part.items()}
        if family == "mistral3":  # Zeros beyond an image are cut off by the model.
            height, width = part["image_sizes"].max(0)
            part["pixel_values"] = part["pixel_values"][..., :height, :width]
        messages = [*row["prompt"], *row[answer]]
        images = [pictures[0], pictures[1 + number]]
        check_path(example, number, plain(model, messages, images), part, model)


def test_onevision_prepares_images_of_a_prompt_and_an_answer_as_one(
    tmp_path: Path, pictures: list[Image.Image]
) -> None:
    model = FAMILIES["llava_onevision"](tmp_path / "model")
    row: dict[str, Any] = {
        "prompt": [talk("Look.", 1)],
        "chosen": [said("I see"), talk("And?", 1), said("a")],
        "rejected": [said("no")],
        "images": ["0.png", "1.png"],
    }
    with pytest.raises(Exception) as error:
        prepared(model, [row], tmp_path, "dpo")
    assert str(error.value) == (
        f"{tmp_path}/rows.jsonl line 1: the processor of this model prepares images of the prompt "
        "and of an answer as one; move all images to the prompt, or remove the row"
    )


def test_arrays_of_other_sizes_are_filled_up_with_zeros() -> None:
    made = joined([{"a": np.ones((1, 1, 2))}, {"a": np.ones((2, 2, 1))}, {}])
    assert made["a"].tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]], [[1, 0], [1, 0]]]
