"""`demo:shapes`: its images, questions and rows, and its base model in plain transformers."""

import base64
import io
import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from rlhf.errors import RLHFError
from rlhf_devkit import shared, tiny
from rlhf_vision.demo import FORMATS, asked, model_folder, recipe, rows, settings, shapes


def right_answer(question: shapes.Question) -> str:
    """Return the answer as the things in the images give it."""
    first = question.scenes[0]
    things = {thing.name: thing for thing in first.things}
    digits, shown = [name for name in things if name.isdigit()], question.text.split()
    if question.kind == "color":
        return f"It is {things[shown[-1].rstrip('?')].color}."
    if question.kind == "shape":
        (name,) = (each.name for each in first.things if each.color == shown[-1].rstrip("?"))
        return f"It is a {name}."
    if question.kind == "digit":
        return f"It is {digits[0]}."
    if question.kind == "count":
        return f"I count {sum(each.name in shapes.SHAPES for each in first.things)}."
    if question.kind == "image":
        return f"It is in the {'first' if digits else 'second'}."
    thing = things[shown[2]]
    if "top" in shown:
        return f"It is at the {'top' if 2 * thing.row + 1 < first.rows else 'bottom'}."
    return f"It is on the {'left' if 2 * thing.column + 1 < first.columns else 'right'}."


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_answers_are_right_and_always_the_same(split: str) -> None:
    questions = list(islice(shapes.questions(split), 120))
    assert questions == list(islice(shapes.questions(split), 120))
    assert Counter(each.kind for each in questions) == dict.fromkeys(shapes.KINDS, 20)
    for question in questions:
        assert question.answer == right_answer(question)
        assert question.wrong
        assert question.answer not in question.wrong


def test_no_image_is_in_both_splits() -> None:
    train = {scene for each in islice(shapes.questions("train"), 1000) for scene in each.scenes}
    held_out = {scene for each in shapes.questions("eval") for scene in each.scenes}
    assert not train & held_out


def test_images_have_several_sizes_and_show_their_things() -> None:
    draw, sizes = random.Random(0), set()
    for _ in range(100):
        scene = shapes.scene(draw, [("square", "red"), ("7", "blue")])
        image = shapes.image(scene)
        sizes.add(image.size)
        for thing in scene.things:
            x, y = thing.column * shapes.CELL, thing.row * shapes.CELL
            cell = image.crop((x, y, x + shapes.CELL, y + shapes.CELL))
            colors = {color for _, color in cell.getcolors()}
            assert colors == {scene.background, shapes.COLORS[thing.color]}
    assert sizes == {(width, height) for width in (56, 84, 112) for height in (56, 84)}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_rows_with_images_and_parts(format: str) -> None:
    made = rows("eval", format)
    assert len(made) == 200
    for row in made[:24]:
        messages = row["messages"][:1] if format == "demonstration" else row["prompt"]
        parts = [part["type"] for part in messages[0]["content"]]
        assert parts == [*["image"] * len(row["images"]), "text"]
        for url in row["images"]:
            head, data = url.split(",")
            assert head == "data:image/png;base64"
            assert Image.open(io.BytesIO(base64.b64decode(data))).mode == "RGB"
    if format == "preference":
        assert all(row["chosen"] != row["rejected"] for row in made)
    if format == "unpaired":
        assert 70 < Counter(row["label"] for row in made)[True] < 130


def test_a_split_or_a_format_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RLHFError) as caught:
        rows("test", "prompt")
    assert str(caught.value) == "demo:shapes has no split 'test'; available: eval, train"
    with pytest.raises(RLHFError) as caught:
        rows("eval", "stepwise")
    assert str(caught.value) == (
        "demo:shapes has no stepwise rows; available: demonstration, preference, prompt, unpaired"
    )


def test_its_model_is_refused_for_reward_models_before_rows_are_read() -> None:
    with pytest.raises(RLHFError) as caught:
        settings("rm")
    assert str(caught.value) == (
        "the model of demo:shapes cannot be trained by rm, since transformers has no classifier of "
        "its family, qwen3_vl; pass --model with a model of another family, such as qwen3_5"
    )


def answers_of(folder: Path, questions: Sequence[shapes.Question]) -> list[str]:
    """Return what the model in a folder answers in plain transformers."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.dtype == torch.float32
    texts = [
        processor.apply_chat_template([asked(each)], add_generation_prompt=True)
        for each in questions
    ]
    batch = processor(
        text=texts,
        images=[[shapes.image(scene) for scene in each.scenes] for each in questions],
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    written = model.generate(**batch, max_new_tokens=12, do_sample=False)
    new = written[:, batch["input_ids"].shape[1] :]
    return list(processor.batch_decode(new, skip_special_tokens=True))


def test_plain_transformers_opens_the_base_model_which_answers_about_half() -> None:
    folder = model_folder()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    questions = list(islice(shapes.questions("eval"), 60))
    pairs = list(zip(answers_of(folder, questions), questions, strict=True))
    assert sum(text in (each.answer, *each.wrong) for text, each in pairs) > 50
    assert 20 < sum(text == each.answer for text, each in pairs) < 42


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("trainer", "metric", "bounds", "share"),
    [
        ("sft", "mean_token_accuracy", (0.95, 0.95), 0.85),
        ("kto", "rewards/margins", (0.01, 0.2), 0.57),
    ],
)
def test_the_demo_teaches_what_is_in_the_images(
    trainer: str, metric: str, bounds: tuple[float, float], share: float, tmp_path: Path
) -> None:
    words = ["--data", "demo:shapes", "--output", str(tmp_path / "run")]
    metrics = shared(1).run(tiny.run, trainer, words, str(tmp_path / "cache"), timeout=900)[0]
    evaluations = [line[f"eval/{metric}"] for line in metrics if "eval/loss" in line]
    assert evaluations[0] < bounds[0]
    assert evaluations[-1] > bounds[1]
    questions = list(shapes.questions("eval"))
    answers = answers_of(tmp_path / "run" / "model", questions)
    right = [text == each.answer for text, each in zip(answers, questions, strict=True)]
    assert sum(right) / len(right) > share


def test_the_recipe_makes_the_same_processor_and_configuration_and_learns() -> None:
    processor, saved = recipe.make_processor(), AutoProcessor.from_pretrained(model_folder())
    assert processor.tokenizer.get_vocab() == saved.tokenizer.get_vocab()
    assert processor.chat_template == saved.chat_template
    model, config = (
        recipe.make_model(processor.tokenizer),
        AutoConfig.from_pretrained(model_folder()),
    )
    for part in ("text_config", "vision_config"):
        assert getattr(model.config, part).to_dict() == getattr(config, part).to_dict()
    for lesson, fall in ((recipe.sight, 1.0), (recipe.answers, 1.0)):
        losses = list(lesson(model, processor, 6))
        assert losses[-1] < losses[0] - fall
