"""An image that is damaged or unusual is either converted or an error of one line."""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vision_models import picture

from rlhf.formats import BadImage
from rlhf_vision import opening
from rlhf_vision.opening import file_digest, name_of, open_image

REPLACE = "replace it, or set data.bad_images to drop"
RED = (255, 0, 0)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(value: Any, folder: Path = Path()) -> Image.Image:
    return open_image(name_of(0, value), value, folder, {})


def refusal(value: Any, folder: Path = Path()) -> str:
    with pytest.raises(BadImage) as error:
        opened(value, folder)
    return str(error.value)


def pixels(image: Image.Image) -> list[Any]:
    assert image.mode == "RGB"
    return np.asarray(image).tolist()


def test_every_way_to_give_an_image_gives_the_same_pixels(tmp_path: Path) -> None:
    image = picture(3, 2)
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    values = ["a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", data, image, url]
    values += [{"bytes": data, "path": "lost.png"}, {"bytes": None, "path": "a.png"}]
    for value in values:
        assert pixels(opened(value, tmp_path)) == pixels(image)


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "1", "RGBA", "LA"])
def test_every_kind_of_pixels_becomes_rgb_as_in_transformers(mode: str) -> None:
    image = picture(4, 4).convert("RGB").convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    stored = Image.open(io.BytesIO(encoded(image, kind)))
    assert pixels(opened(encoded(image, kind))) == pixels(stored.convert("RGB"))


def test_sixteen_bits_keep_their_upper_eight() -> None:
    image = Image.fromarray(np.array([[0, 255, 256, 65535]], np.uint16))
    expected = [[[0] * 3, [0] * 3, [1] * 3, [255] * 3]]
    assert pixels(opened(encoded(image))) == expected
    assert pixels(opened(encoded(image, "TIFF"))) == expected
    grey = b"P5 4 1 65535 " + np.array([0, 255, 256, 65535], ">u2").tobytes()
    assert Image.open(io.BytesIO(grey)).mode == "I"
    assert pixels(opened(grey)) == expected


def test_a_photo_is_turned_as_its_exif_data_say() -> None:
    image = Image.new("RGB", (2, 1))
    image.putpixel((0, 0), RED)
    exif = Image.Exif()
    exif[0x0112] = 6  # Turned by a quarter to the left.
    assert pixels(opened(encoded(image, exif=exif))) == [[list(RED)], [[0, 0, 0]]]


def test_a_gif_of_one_frame_is_an_image() -> None:
    assert opened(encoded(Image.new("P", (2, 2)), "GIF")).size == (2, 2)


INTEGERS = (
    "image 1 has integers of 32 bits or with a sign, and nothing says which of them is white; save "
    "it with 8 or 16 bits, or set data.bad_images to drop"
)


def animation() -> bytes:
    frames = [Image.new("RGB", (2, 2), color) for color in (RED, (0, 0, 255), (0, 255, 0))]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: b"", f"image 1 is empty; {REPLACE}"),
        (lambda: b"no picture", f"image 1 is not an image that Pillow can read; {REPLACE}"),
        (
            lambda: encoded(picture(64, 64))[:2000],
            f"image 1 is damaged (image file is truncated); {REPLACE}",
        ),
        (
            animation,
            "image 1 has 3 frames, but a model reads one picture; save the frame that is meant as "
            "an image, or set data.bad_images to drop",
        ),
        (
            lambda: encoded(Image.new("F", (2, 2)), "TIFF"),
            "image 1 has pixels of floats; save it with 8 bits, or set data.bad_images to drop",
        ),
        (lambda: encoded(Image.new("I", (2, 2), 100), "TIFF"), INTEGERS),
        (lambda: Image.fromarray(np.array([[0, 100]], np.int32)), INTEGERS),
        (lambda: Image.new("RGB", (0, 3)), f"image 1 has 0 x 3 pixels; {REPLACE}"),
        (
            lambda: 3,
            "image 1 is a value of type int; give a path, the bytes of an image file, or a mapping "
            "with `path` or `bytes`, or set data.bad_images to drop",
        ),
        (
            lambda: {"bytes": None, "path": None},
            "image 1 is null; give a path, the bytes of an image file, or a mapping with `path` or "
            "`bytes`, or set data.bad_images to drop",
        ),
        (
            lambda: "https://example.org/cat.png",
            "image 1 (https://example.org/cat.png) is a URL, and runs download no images; "
            "`rlhf fetch ROWS FOLDER` writes rows with files in their place, or set "
            "data.bad_images to drop",
        ),
        (
            lambda: "data:image/png;base64,!",
            f"image 1 (data:image/png;base64,!) is not valid base64; {REPLACE}",
        ),
        (lambda: "data:,\u00e9", f"image 1 (data:,\u00e9) is not valid base64; {REPLACE}"),
        (
            lambda: Image.open(io.BytesIO(encoded(picture(40, 40))[:900])),
            f"image 1 is damaged (image file is truncated); {REPLACE}",
        ),
    ],
)
def test_what_is_not_one_picture_is_an_error(value: Callable[[], Any], text: str) -> None:
    assert refusal(value()) == text


def test_base64_without_a_prefix_is_named_without_its_text() -> None:
    text = refusal(base64.b64encode(encoded(picture(20, 20))).decode())
    assert text.startswith("image 1 (iVBORw0KGgo")
    assert text.endswith(
        "...) is base64 without a prefix; write it as `data:;base64,...`, or set data.bad_images "
        "to drop"
    )
    assert len(text) < 200
    assert len(refusal("a.png/" * 5000)) < 1300


def test_a_path_with_a_byte_of_zero_is_an_error(tmp_path: Path) -> None:
    assert "embedded null" in refusal("a\0.png", tmp_path)
    assert file_digest("a\0.png", tmp_path) == ""


def test_a_missing_file_is_named_with_its_path(tmp_path: Path) -> None:
    assert refusal("a/b.png", tmp_path) == (
        f"image 1 (a/b.png) cannot be read from {tmp_path}/a/b.png: no such file or directory; "
        "correct the path, or set data.bad_images to drop"
    )
    assert refusal(".", tmp_path) == (
        f"image 1 (.) cannot be read from {tmp_path}: is a directory; correct the path, or set "
        "data.bad_images to drop"
    )


@pytest.mark.parametrize("bound", [90, 40])
def test_more_pixels_than_the_bound_are_not_read(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(Image.new("RGB", (10, 10)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", bound)
    monkeypatch.setattr(opening, "MAX_PIXELS", bound)
    assert refusal(data) == (
        f"image 1 has more than {bound} pixels; make it smaller, or set data.bad_images to drop"
    )


def test_the_digest_of_a_file_is_that_of_its_content_and_then_its_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    digest = file_digest("a", tmp_path)
    files: dict[str, str] = {}
    with pytest.raises(BadImage):
        open_image("image 1", "a", tmp_path, files)
    assert files == {"a": digest}
    content = digest.partition(":")[0]
    os.utime(tmp_path / "a", (9, 9))
    assert file_digest("a", tmp_path, digest) == f"{content}:3:9000000000"
    # With the same size and time the content is not read.
    (tmp_path / "a").write_bytes(b"two")
    os.utime(tmp_path / "a", (9, 9))
    assert file_digest("a", tmp_path, f"{content}:3:9000000000") == f"{content}:3:9000000000"
    (tmp_path / "a").write_bytes(b"other")
    assert file_digest("a", tmp_path, digest).partition(":")[0] != digest.partition(":")[0]
    (tmp_path / "a").unlink()
    assert file_digest("a", tmp_path, digest) == ""


def test_a_data_url_is_named_by_its_first_characters() -> None:
    url = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAAAFQAAAA4"
    assert name_of(0, url) == "image 1 (data:image/png;base64,iVBORw0KGgoAAAA...)"
    assert name_of(1, {"path": "folder/" * 8}) == f"image 2 ({'folder/' * 8})"
