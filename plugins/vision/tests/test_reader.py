"""Files of rows with images, from their first row to the examples that a run trains on."""

import base64
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_rows import examples, of_file, prepared, tokens_of
from PIL import Image
from vision_models import glm4v, picture, qwen2_5_vl, qwen3_vl

from rlhf.errors import RLHFError

ROW = {"prompt": "<image>Who?", "completion": "A cat.", "images": ["a.png"]}
TEXT = {"prompt": [{"role": "user", "content": "Who?"}], "completion": "A cat."}
IMAGE = 262
"""The token of a feature."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    picture(40, 30).save(tmp_path / "a.png")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return qwen2_5_vl(tmp_path / "model")


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(RLHFError) as error:
        action()
    return str(error.value)


def test_rows_without_images_have_the_same_inputs_without_rows(tmp_path: Path, model: Path) -> None:
    first, second = examples(model, [TEXT, ROW], tmp_path)
    assert {*first.inputs} == {*second.inputs}
    assert first.inputs["pixel_values"].shape == (0, 96)
    assert second.inputs["pixel_values"].shape == (80, 96)
    assert first.inputs["image_grid_thw"].shape == (0, 3)
    size = len(tokens_of(first))
    assert first.inputs["mm_token_type_ids"].tolist() == [0] * size
    assert first.inputs["position_ids"].tolist() == [[n] * 3 for n in range(size)]
    assert tokens_of(second).count(IMAGE) == 20


def test_files_without_images_have_the_inputs_of_others(tmp_path: Path, model: Path) -> None:
    for name, row in (("text.jsonl", TEXT), ("pictures.jsonl", ROW)):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    both = json.dumps([str(tmp_path / "text.jsonl"), str(tmp_path / "pictures.jsonl")])
    first, second = of_file(model, both).train  # type: ignore[arg-type]
    assert {*first.inputs} == {*second.inputs}
    (text,) = of_file(model, tmp_path / "text.jsonl").train
    assert text.inputs == {}


def test_columns_of_other_names_are_renamed_before_their_placeholders_are_read(
    tmp_path: Path, model: Path
) -> None:
    (expected,) = examples(model, [ROW], tmp_path)
    row = {"question": ROW["prompt"], "reply": ROW["completion"], "pictures": ROW["images"]}
    (tmp_path / "renamed.jsonl").write_text(json.dumps(row) + "\n")
    columns = {"prompt": "question", "completion": "reply", "images": "pictures"}
    entry = json.dumps([{"path": str(tmp_path / "renamed.jsonl"), "columns": columns}])
    (found,) = of_file(model, entry).train  # type: ignore[arg-type]
    assert tokens_of(found) == tokens_of(expected)
    assert np.array_equal(found.inputs["pixel_values"], expected.inputs["pixel_values"])


def test_a_row_without_images_is_tokenised_as_by_a_model_of_text(
    tmp_path: Path, model: Path
) -> None:
    first, _ = examples(model, [TEXT, ROW], tmp_path)
    (text,) = examples(model, [TEXT], tmp_path / "other")
    assert tokens_of(first) == tokens_of(text)


def test_a_changed_image_is_prepared_again_and_an_untouched_one_is_not(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = examples(model, [ROW], tmp_path)
    picture(20, 50, seed=3).save(tmp_path / "a.png")
    (second,) = examples(model, [ROW], tmp_path)
    assert second.inputs["image_grid_thw"].tolist() != first.inputs["image_grid_thw"].tolist()
    monkeypatch.setattr("rlhf_vision.reader.open_image", None)  # Another call would fail.
    (again,) = examples(model, [ROW], tmp_path)
    np.testing.assert_array_equal(again.inputs["pixel_values"], second.inputs["pixel_values"])
    picture(40, 30).save(tmp_path / "a.png")
    (back,) = examples(model, [ROW], tmp_path)
    np.testing.assert_array_equal(back.inputs["pixel_values"], first.inputs["pixel_values"])


def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which the paths of images are added whose content is read."""
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def noted(path: Path) -> bytes:
        read.extend([path] * (path.suffix == ".png"))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    return read


def test_a_file_that_was_written_anew_is_read_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "a.png", read_files(monkeypatch)
    (first,) = examples(model, [ROW], tmp_path)
    read.clear()
    examples(model, [ROW], tmp_path)
    assert read == []
    os.utime(file, (9, 9))
    for expected in ([file], []):
        (again,) = examples(model, [ROW], tmp_path)
        assert read == expected
        np.testing.assert_array_equal(again.inputs["pixel_values"], first.inputs["pixel_values"])
        read.clear()
    (newest,) = (tmp_path / "cache").rglob("newest.json")
    assert [path.name for path in newest.parent.glob("newest*")] == ["newest.json"]
    # What a killed process or a full disk has left counts as nothing.
    newest.write_text("{")
    assert tokens_of(examples(model, [ROW], tmp_path)[0]) == tokens_of(first)
    assert read == [file]
    # Another picture is read and prepared once.
    picture(20, 50, seed=3).save(file)
    (other,) = examples(model, [ROW], tmp_path)
    assert other.inputs["image_grid_thw"].tolist() != first.inputs["image_grid_thw"].tolist()
    read.clear()
    (again,) = examples(model, [ROW], tmp_path)
    np.testing.assert_array_equal(again.inputs["pixel_values"], other.inputs["pixel_values"])
    assert read == []


def test_a_cache_that_cannot_be_written_is_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = examples(model, [ROW], tmp_path)
    os.utime(tmp_path / "a.png", (9, 9))
    write_text = Path.write_text

    def refused(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name.startswith("newest"):
            raise OSError(errno.EROFS, "Read-only file system")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", refused)
    (again,) = examples(model, [ROW], tmp_path)
    assert tokens_of(again) == tokens_of(first)


def test_a_changed_processor_prepares_images_again(tmp_path: Path, model: Path) -> None:
    (first,) = examples(model, [ROW], tmp_path)
    file = model / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 64, "longest_edge": 512}
    file.write_text(json.dumps(settings))
    (second,) = examples(model, [ROW], tmp_path)
    assert len(second.inputs["pixel_values"]) < len(first.inputs["pixel_values"])


def test_bad_rows_name_their_line_or_are_dropped_and_counted(tmp_path: Path, model: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"no picture")
    picture(1, 300).save(tmp_path / "thin.png")
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {**ROW, "images": ["b.png"]},
            "image 1 (b.png) is not an image that Pillow can read; replace it, or set "
            "data.bad_images to drop",
        ),
        (
            {**ROW, "images": ["a.png", "a.png"]},
            "the row has 1 placeholder for 2 images; correct the row, or set data.bad_images to "
            "drop",
        ),
        (
            {**ROW, "images": ["thin.png"]},
            "image 1 (thin.png) of 1 x 300 pixels cannot be prepared for the model (absolute "
            "aspect ratio must be smaller than 200, got 300.0); replace it, or set "
            "data.bad_images to drop",
        ),
        (
            {"messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A"}]},
                {"role": "assistant", "content": "Write <|image_pad|>."},
            ], "images": ["a.png"]},
            "the text has 2 placeholders <|image_pad|> for 1 image; correct the row, or set "
            "data.bad_images to drop",
        ),
    ]  # fmt: skip
    for row, text in bad:
        message = refusal(lambda row=row: examples(model, [ROW, row], tmp_path))  # type: ignore[misc]
        assert message == f"{tmp_path}/rows.jsonl line 2: {text}"
    rows = [ROW, *(row for row, _ in bad), TEXT]
    data = prepared(model, rows, tmp_path, "sft", "--data.bad_images", "drop")
    assert len(data.train) == 2
    assert data.train.report.bad_images == 4
    assert str(data.train.report).startswith("6 rows; 4 with bad images (dropped), 66.7 %; 2")
    assert data.train.report.lost["bad_images"] == tuple(
        f"{tmp_path}/rows.jsonl line {line}" for line in (2, 3, 4, 5)
    )
    (warning,) = data.warnings()
    assert warning.endswith("set data.bad_images to error to see what is wrong with 4 rows")
    # A file that was replaced is read again.
    picture(8, 8).save(tmp_path / "b.png")
    data = prepared(model, rows, tmp_path, "sft", "--data.bad_images", "drop")
    assert len(data.train) == 3


def test_data_without_a_good_image_name_the_rows(tmp_path: Path, model: Path) -> None:
    rows = [{**ROW, "images": ["b.png"]}]
    message = refusal(lambda: examples(model, rows, tmp_path, "--data.bad_images", "drop"))
    assert message == (
        f"data.train: no trainable rows left of 1: 1 with bad images ({tmp_path}/rows.jsonl line 1)"
    )


def test_a_row_is_not_cut_through_an_image(tmp_path: Path, model: Path) -> None:
    words = ["--data.max_tokens", "60", "--data.too_long", "cut"]
    data = prepared(model, [ROW, {**ROW, "completion": "A " * 99}], tmp_path, "sft", *words)
    assert (data.train.report.too_long, data.train.report.cut, len(data.train)) == (1, 0, 1)


def test_a_table_with_images_of_datasets(tmp_path: Path, model: Path) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as Pictures

    features = Features({
        "images": [Pictures()], "prompt": Value("string"), "completion": Value("string"),
    })  # fmt: skip
    row = {**ROW, "images": [Image.open(tmp_path / "a.png")]}
    table = Dataset.from_list([row], features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    (expected,) = examples(model, [ROW], tmp_path)
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        (example,) = of_file(model, path).train
        assert tokens_of(example) == tokens_of(expected)
        np.testing.assert_array_equal(
            example.inputs["pixel_values"], expected.inputs["pixel_values"]
        )


def test_unpaired_rows_and_pairs_of_text(tmp_path: Path, model: Path) -> None:
    rows = [{**ROW, "label": True}, {**ROW, "completion": "A dog.", "label": False}]
    example = prepared(model, rows, tmp_path, "kto").train[0]
    assert tokens_of(example).count(IMAGE) == 20
    pair = {"prompt": "<image>Who?", "chosen": "A cat.", "rejected": "A dog.", "image": "a.png"}
    first, second, *_ = prepared(model, [pair, *rows], tmp_path, "kto").train
    assert tokens_of(first).count(IMAGE) == tokens_of(second).count(IMAGE) == 20
    (tree,) = prepared(model, [pair], tmp_path, "dpo").train
    assert [*map(int, tree.prompt)].count(IMAGE) == 20
    assert tree.inputs["pixel_values"].shape == (80, 96)


def asked_again(path: str) -> list[Any]:
    """An answer after which the user shows an image."""
    more = [{"role": "user", "content": [{"type": "image", "path": path}]}]
    said = {"role": "assistant", "content": "A cat."}
    return [said, *more, said]


def test_kto_refuses_images_in_a_completion_that_other_prompts_would_get(
    tmp_path: Path, model: Path
) -> None:
    row = {"prompt": TEXT["prompt"], "completion": asked_again("a.png"), "label": True}
    rows = [row, {**TEXT, "label": False}]
    data = prepared(model, rows, tmp_path, "kto", "--kto.loss", "apo_zero_unpaired")
    names = sorted({*data.train[0].inputs} & {"pixel_values", "image_grid_thw"})
    assert data.train[0].inputs["segment_rows"].tolist() == [[1, 80], [0, 0]]
    assert names == ["image_grid_thw", "pixel_values"]
    assert refusal(lambda: prepared(model, rows, tmp_path, "kto")) == (
        "data.train: a completion has an image, which the mismatched pairs of kto.loss kto cannot "
        "have; move it to the prompt, or set kto.loss to apo_zero_unpaired"
    )


def test_the_token_of_an_image_in_a_row_without_one_is_an_error(
    tmp_path: Path, model: Path
) -> None:
    row = {**TEXT, "completion": "The token <|image_pad|> red."}
    assert refusal(lambda: examples(model, [TEXT, ROW, row], tmp_path)) == (
        f"{tmp_path}/rows.jsonl line 3: the row has <|image_pad|>, which stands for an image, but "
        "no image; remove it from the text, or remove the row"
    )
    assert len(examples(model, [TEXT, row], tmp_path)) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": 5}, {"prompt": 5, "completion": "A"}, {"prompt": "Q", "chosen": 5},
        {"prompt": "Q", "answers": 5}, {"prompt": "Q", "answers": [5, None]},
        {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "A"}]},
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_an_error_of_its_row(
    tmp_path: Path, model: Path, row: dict[str, Any]
) -> None:
    trainer = "dpo" if {"chosen", "answers"} & row.keys() else "sft"
    message = refusal(lambda: prepared(model, [row | {"image": "a.png"}], tmp_path, trainer))
    assert message.startswith(f"{tmp_path}/rows.jsonl line 1: ")


def test_answers_with_other_images_after_the_same_text_are_an_error(
    tmp_path: Path, model: Path
) -> None:
    picture(40, 30, seed=1).save(tmp_path / "b.png")

    def talk(path: str) -> list[Any]:
        question = {"role": "user", "content": [{"type": "image", "path": path}]}
        return [question, {"role": "assistant", "content": path}]

    row = {"chosen": talk("a.png"), "rejected": talk("b.png")}
    assert refusal(lambda: prepared(model, [row], tmp_path, "dpo")) == (
        f"{tmp_path}/rows.jsonl line 1: the answers have different images after the same text "
        "(image 1 and image 2); give all answers one prompt with the same images"
    )


def test_text_for_pretraining_has_features_in_place(tmp_path: Path, model: Path) -> None:
    (example,) = examples(model, [{"text": "<image> A cat.", "image": "a.png"}], tmp_path)
    assert tokens_of(example)[1:21] == [IMAGE] * 20
    trained = [*map(bool, np.asarray(example.answers[0].trained))]
    assert trained == [True] + [False] * 20 + [True] * (len(trained) - 21)
    assert sum(trained) > 2


@pytest.mark.parametrize("make", [qwen2_5_vl, qwen3_vl, glm4v])
def test_the_tokens_of_a_model_around_an_image_are_not_written_twice(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = make(tmp_path / "other")
    image = {"glm4v": "<|begin_of_image|><|image|><|end_of_image|>"}.get(
        make.__name__, "<|vision_start|><|image_pad|><|vision_end|>"
    )
    rows = [{**ROW, "prompt": f"{each}Who?"} for each in ("<image>", image)]
    one, other = examples(model, rows, tmp_path)
    assert tokens_of(one) == tokens_of(other)


def test_images_that_a_model_would_take_for_one_are_an_error(tmp_path: Path, model: Path) -> None:
    row = {"text": "<|image_pad|><|image_pad|> Cats.", "images": ["a.png", "a.png"]}
    message = refusal(lambda: examples(model, [row], tmp_path))
    assert message.startswith(
        f"{tmp_path}/rows.jsonl line 1: the positions of the row's tokens cannot be computed ("
    )
    assert message.endswith("); write text between its images")
    row = {"text": "<image><image> Cats.", "images": ["a.png", "a.png"]}
    (example,) = examples(model, [row], tmp_path)
    assert tokens_of(example).count(IMAGE) == 40


def test_a_model_of_text_and_a_part_without_a_tower_are_errors(tmp_path: Path, model: Path) -> None:
    message = refusal(lambda: examples(model, [ROW], tmp_path, "--model.part", "text"))
    assert message == (
        f"{tmp_path}/rows.jsonl line 1: the row has images, but model.part text loads no vision "
        "tower; remove it"
    )
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").unlink()
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert refusal(lambda: examples(model, [ROW], tmp_path)) == (
        f"{tmp_path}/rows.jsonl line 1: the row has images, but the model in {model} reads text "
        "only; remove the images or set model.path to a model that reads them"
    )


def test_a_template_that_prints_no_images_is_an_error(tmp_path: Path, model: Path) -> None:
    message = refusal(lambda: examples(model, [ROW], tmp_path, "--data.chat_template", "chatml"))
    assert message.startswith(f"{tmp_path}/rows.jsonl line 1: ")
    assert "chat template" in message


@pytest.mark.matrix
def test_several_processes_prepare_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**ROW, "completion": str(number)} for number in range(4)]
    single = examples(model, rows, tmp_path)
    monkeypatch.setattr("rlhf.data.tokenise.IMAGE_ROWS_PER_PROCESS", 1)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "other"))
    several = examples(model, rows, tmp_path, "--data.processes", "2")
    assert [tokens_of(each) for each in several] == [tokens_of(each) for each in single]
    for one, other in zip(single, several, strict=True):
        np.testing.assert_array_equal(one.inputs["pixel_values"], other.inputs["pixel_values"])


def test_each_image_has_a_line_with_its_size_and_its_tokens(tmp_path: Path, model: Path) -> None:
    train = examples(model, [ROW, TEXT], tmp_path)
    assert train.images(0) == ["image 1 (a.png): 40 x 30 pixels, 20 tokens"]
    assert train.images(1) == []


def decoded(url: str) -> Image.Image:
    head, _, content = url.partition(",")
    assert head == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_rows_keep_small_pictures_of_their_first_images(tmp_path: Path, model: Path) -> None:
    Image.new("RGB", (400, 100), "red").save(tmp_path / "wide.png")
    Image.new("RGB", (4, 700), "blue").save(tmp_path / "thin.png")
    names = ["wide.png", "a.png", "thin.png"] * 3
    row = {**ROW, "prompt": "<image>" * 9, "images": names}
    train = examples(model, [TEXT, row], tmp_path)
    assert train.thumbnails(0) == []
    small = [decoded(url) for url in train.thumbnails(1)]
    assert [image.size for image in small] == [(128, 32), (40, 30), (1, 128)] * 2 + [
        (128, 32), (40, 30)
    ]  # fmt: skip
    assert np.abs(np.asarray(small[0], int) - [254, 0, 0]).max() <= 2
    assert max(map(len, train.thumbnails(1))) < 4000
    (tmp_path / "wide.png").unlink()
    Image.new("RGB", (400, 100), "green").save(tmp_path / "wide.png")
    again = examples(model, [TEXT, row], tmp_path)
    assert np.abs(np.asarray(decoded(again.thumbnails(1)[0]), int) - [0, 128, 0]).max() <= 2
    assert again.thumbnails(1)[1] == train.thumbnails(1)[1]


def test_the_template_of_an_older_processor_is_used(tmp_path: Path, model: Path) -> None:
    (expected,) = examples(model, [ROW], tmp_path)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (example,) = examples(model, [ROW], tmp_path)
    assert tokens_of(example) == tokens_of(expected)


def test_a_processor_that_does_not_count_is_an_error(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: Any, images: Any) -> None:
        raise NotImplementedError("no such method")

    monkeypatch.setattr("rlhf_vision.processor.Processor._call", call)
    assert refusal(lambda: examples(model, [ROW], tmp_path)) == (
        f"{tmp_path}/rows.jsonl line 1: the row has images, but the processor of {model} cannot "
        "say how many tokens an image has (no such method); choose a model of another family"
    )


def test_a_processor_that_cannot_be_loaded_names_what_it_lacks(tmp_path: Path, model: Path) -> None:
    (model / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuch"}')
    message = refusal(lambda: examples(model, [ROW], tmp_path))
    start = f"{tmp_path}/rows.jsonl line 1: the row has images, but the processor of {model} cannot"
    assert message.startswith(f"{start} be loaded (")
    assert message.endswith(
        "); install torchvision or another package that it names, or check its files"
    )
