"""Rows of other projects, as they are: what stands for an image becomes a part of a message, and
every image is matched with its part."""

from collections.abc import Mapping
from typing import Any

import pytest

from rlhf.errors import RLHFError
from rlhf.formats import BadImage
from rlhf_vision.rows import Placeholders, Shaper

QWEN = Placeholders.of("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
SAID = {"role": "assistant", "content": "A cat."}
ONE = {"type": "image", "image": 0}
TWO = {"type": "image", "image": 1}


def shaped(row: Mapping[str, Any], placeholders: Placeholders = QWEN) -> tuple[Any, list[Any]]:
    return Shaper(placeholders).shape(row)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def test_llava_and_sharegpt4v() -> None:
    talk = [
        {"from": "human", "value": "<image>\nWhat is this?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure?"},
    ]
    row, values = shaped({"id": "1", "image": "coco/1.jpg", "conversations": talk})
    assert values == ["coco/1.jpg"]
    first = {"from": "human", "value": [ONE, text("\nWhat is this?")]}
    assert row == {"id": "1", "conversations": [first, *talk[1:]]}


def test_llama_factory_with_messages_and_with_instructions() -> None:
    talk = [{"role": "user", "content": "<image>Who? And <image>?"}, SAID]
    row, values = shaped({"messages": talk, "images": ["a.jpg", "b.jpg"]})
    assert values == ["a.jpg", "b.jpg"]
    assert row["messages"] == [user(ONE, text("Who? And "), TWO, text("?")), SAID]
    row, _ = shaped(
        {"instruction": "<image>Who?", "input": "x", "output": "A cat.", "images": ["a.jpg"]}
    )
    assert row == {"prompt": [user(ONE, text("Who?\nx"))], "completion": "A cat."}
    ranked = {
        "conversations": [{"from": "human", "value": "<image>Who?"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
        "images": ["a.jpg"],
    }
    row, _ = shaped(ranked)
    assert row["conversations"] == [{"from": "human", "value": [ONE, text("Who?")]}]
    assert row["chosen"] == ranked["chosen"]


def test_trl_with_parts_and_with_content_without_placeholders() -> None:
    question = user({"type": "image"}, text("Who?"))
    row, values = shaped({"prompt": [question], "completion": [SAID], "images": ["a.png"]})
    assert (row["prompt"], values) == ([user(ONE, text("Who?"))], ["a.png"])
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
    row, _ = shaped({"prompt": plain, "completion": [SAID], "images": ["a.png", "b.png"]})
    assert row["prompt"] == [plain[0], user(ONE, TWO, text("Who?"))]
    row, _ = shaped({"prompt": "Who?", "completion": "A cat.", "image": "a.png"})
    assert row["prompt"] == [user(ONE, text("Who?"))]


def test_a_prompt_that_only_the_answers_have_has_the_same_images_in_both() -> None:
    question = user({"type": "image"}, text("Who?"))
    for asked in (question, {"role": "user", "content": "Who?"}):
        row = {"chosen": [asked, SAID], "rejected": [asked, SAID], "images": ["a.png"]}
        row, values = shaped(row)
        assert row["chosen"][0] == row["rejected"][0] == user(ONE, text("Who?"))
        assert values == ["a.png"]


def test_images_of_answers_follow_those_of_the_prompt() -> None:
    more = user({"type": "image"})
    row, _ = shaped({
        "prompt": [more], "chosen": [SAID, more, SAID], "rejected": [SAID, more, SAID],
        "images": ["a", "b", "c"],
    })  # fmt: skip
    found = [row["prompt"][0], row["chosen"][1], row["rejected"][1]]
    assert [message["content"][0]["image"] for message in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "file:///a.png"}, "file:///a.png"),
        ({"type": "image", "base64": "aaaa"}, "data:;base64,aaaa"),
        ({"type": "image_url", "image_url": {"url": "data:x;base64,a"}}, "data:x;base64,a"),
        ({"type": "input_image", "image_url": "a.png"}, "a.png"),
        ({"image": "a.png"}, "a.png"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"bytes": b"x", "path": None}),
    ],
)
def test_a_part_may_have_its_image(part: Any, value: Any) -> None:
    row, values = shaped({"messages": [user(part, text("Who?")), SAID]})
    assert row["messages"] == [user(ONE, text("Who?")), SAID]
    assert values == [value]
    other = {"type": "image", "image": "other.png"}
    row, values = shaped({"messages": [user(part, other, part), SAID]})
    assert row["messages"][0] == user(ONE, TWO, ONE)
    assert len(values) == 2


def test_images_of_the_rejected_answer_alone_are_refused() -> None:
    with pytest.raises(RLHFError) as error:
        shaped({"prompt": "Who?", "images": ["a"], "rejected_images": ["b"]})
    assert str(error.value) == (
        "the row has `rejected_images`, but all answers have the images of one prompt; remove the "
        "column, or the row"
    )


def test_one_part_without_a_list_is_read() -> None:
    talk = [{"role": "user", "content": {"type": "image", "image": "a.png"}}, SAID]
    assert shaped({"messages": talk})[0]["messages"] == [user(ONE), SAID]


@pytest.mark.parametrize("value", [0, 1, True])
def test_a_number_of_the_user_is_a_value_and_not_our_number(value: Any) -> None:
    row, values = shaped({"messages": [user({"type": "image", "image": value}), SAID]})
    assert values == [value]
    assert row["messages"][0] == user(ONE)


def test_placeholders_of_the_model_and_in_parts_of_text_count() -> None:
    wrapped = "<|vision_start|><|image_pad|><|vision_end|>Who?"
    for content in (wrapped, "<|image_pad|>Who?", [text("<image>Who?")]):
        row, _ = shaped({"messages": [{"role": "user", "content": content}, SAID], "image": "a"})
        assert row["messages"][0] == user(ONE, text("Who?"))


def test_plain_text_keeps_what_the_model_has_around_an_image() -> None:
    whole = "<|vision_start|><|image_pad|><|vision_end|>"
    for written, becomes in (
        ("<image> A cat.", f"{whole} A cat."),
        (f"{whole} A cat.", f"{whole} A cat."),
        ("<|image_pad|> A cat.", "<|image_pad|> A cat."),
    ):
        row, values = shaped({"text": written, "image": "a.png"})
        assert (row, values) == ({"text": becomes}, ["a.png"])
    closed = {"text": "<image>a</image>"}
    assert shaped(closed) == (closed, [])


def test_markup_and_answers_keep_what_looks_like_a_placeholder() -> None:
    closed = {"role": "user", "content": "<image>a</image>"}
    answer = {"role": "assistant", "content": "Use <image>."}
    row, _ = shaped({"messages": [user({"type": "image"}), SAID, closed, answer], "image": "a"})
    assert row["messages"][2:] == [closed, answer]


def test_messages_may_be_json_text() -> None:
    row, _ = shaped({"messages": '[{"role": "user", "content": "<image>Who?"}]', "image": "a"})
    assert row["messages"] == [user(ONE, text("Who?"))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [user({"type": "image"})]}, "the row has 1 placeholder for 0 images"),
        (
            {"prompt": "<image><image>", "completion": "a", "images": ["a"]},
            "the row has 2 placeholders for 1 image",
        ),
        (
            {"prompt": [user({"type": "image", "image": "a"})], "completion": "b", "image": "c"},
            "the row has 0 placeholders for 1 image",
        ),
        ({"text": "<image>", "images": ["a", "b"]}, "the row has 1 placeholder for 2 images"),
    ],
)
def test_another_number_of_placeholders_than_images_is_an_error(row: Any, message: str) -> None:
    with pytest.raises(BadImage) as error:
        shaped(row)
    assert str(error.value) == f"{message}; correct the row, or set data.bad_images to drop"


def test_images_beside_other_columns_ask_for_the_columns() -> None:
    with pytest.raises(RLHFError) as error:
        shaped({"image": "a.png", "question": "Who?", "chosen": "A cat.", "rejected": "A dog."})
    assert not isinstance(error.value, BadImage)
    assert str(error.value) == (
        "a row needs `messages`, `prompt` or `text` beside its images, but this one has `image`, "
        "`question`, `chosen`, `rejected`; rename columns with `columns` in data"
    )


def test_an_image_in_an_answer_of_the_model_is_an_error() -> None:
    row = {"messages": [{"role": "assistant", "content": [{"type": "image"}]}], "image": "a"}
    with pytest.raises(RLHFError) as error:
        shaped(row)
    assert str(error.value) == (
        "a message of `messages` (role assistant) has an image, but models answer with text; move "
        "it to a turn of the user, or remove the row"
    )


def test_two_columns_of_images_are_an_error() -> None:
    with pytest.raises(RLHFError) as error:
        shaped({"text": "<image>", "image": "a", "images": ["b"]})
    assert str(error.value) == ("the row has both `image` and `images`; remove one of the columns")


@pytest.mark.parametrize("name", ["instruction", "input"])
def test_an_instruction_that_is_not_text_is_an_error(name: str) -> None:
    with pytest.raises(RLHFError) as error:
        shaped({"instruction": "Who?", "output": "A cat.", "image": "a", name: 7})
    assert str(error.value) == f"`{name}` must be text, not int"
