"""Fifty damaged or odd rows: each is an error of one line or an example, and nothing else is
lost."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_rows import examples, of_file, prepared
from PIL import Image
from vision_models import picture, qwen2_5_vl

from rlhf.errors import RLHFError

SAID = {"role": "assistant", "content": "A cat."}
TALK = [{"role": "user", "content": "<image>Who?"}, SAID]
PHOTO = picture(40, 30)
CANNOT, FRAMES = "is not an image that Pillow can read", "has 2 frames, but a model reads one"
PIXELS, VALUE = "has more than 89,478,485 pixels", "is a value of type "
NO_IMAGE = "message 0 of `messages` has the placeholder <image>, for which the row has no image"


def encoded(kind: str = "PNG", image: Image.Image = PHOTO, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def twice(kind: str) -> bytes:
    """A file with two pictures."""
    return encoded(kind, save_all=True, append_images=[PHOTO.rotate(90)])


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    check = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + check


def header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return encoded()[:8] + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded("JPEG", exif=exif)


FILES: list[tuple[bytes, str]] = [
    (encoded()[:1500], "is damaged (image file is truncated)"),
    (encoded("JPEG")[:400], "is damaged (Truncated File Read)"),
    (encoded("WEBP")[:100], "is damaged ("),
    (encoded()[:60] + b"\xff" * 4 + encoded()[64:], "is damaged (broken data stream"),
    (encoded()[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"0" * 2**24)) + encoded()[33:],
     "is damaged (Decompressed data too large"),
    (b"", "is empty"),
    (b"hello", CANNOT),
    (b"<html>404</html>", CANNOT),
    (b'<svg xmlns="http://www.w3.org/2000/svg"/>', CANNOT),
    (b"version https://git-lfs.github.com/spec/v1\n", CANNOT),
    (header(0, 3), CANNOT),
    (header(10001, 10001), PIXELS),
    (header(60000, 60000), PIXELS),
    (twice("GIF"), FRAMES),
    (twice("WEBP"), FRAMES),
    (twice("PNG"), FRAMES),
    (twice("TIFF"), FRAMES),
    (encoded("TIFF", Image.new("F", (9, 9))), "has pixels of floats"),
    (encoded("TIFF", Image.new("I", (9, 9))), "has integers of 32 bits or with a sign"),
    (encoded(image=picture(1, 300)), "of 1 x 300 pixels cannot be prepared for the model"),
    (encoded("GIF"), ""),
    (encoded("JPEG", PHOTO.convert("CMYK")), ""),
    (encoded(image=PHOTO.convert("P")), ""),
    (encoded(image=PHOTO.convert("P"), transparency=0), ""),
    (encoded(image=PHOTO.convert("RGBA")), ""),
    (encoded(image=PHOTO.convert("LA")), ""),
    (encoded(image=PHOTO.convert("1")), ""),
    (encoded(image=Image.fromarray(np.full((9, 9), 40000, np.uint16))), ""),
    (encoded("BMP"), ""),
    (encoded(image=picture(1, 1)), ""),
    (turned(), ""),
]  # fmt: skip
"""Files, and how the error of their rows begins after the name of the image; empty if there is
none."""
VALUES: list[tuple[Any, str]] = [
    ("folder", "cannot be read from"),
    ("no.png", "cannot be read from"),
    ("", "cannot be read from"),
    ("a\0b.png", "cannot be read from"),
    ("https://example.org/a.png", "is a URL, and runs download no images"),
    ("data:image/png;base64,???", "is not valid base64"),
    (base64.b64encode(encoded()).decode(), "is base64 without a prefix"),
    (3, f"{VALUE}int"),
    (True, f"{VALUE}bool"),
    ({}, "is null"),
    (["0.png"], "is a list"),
    ({"bytes": [1, 2]}, "is a list"),
    (f"data:image/png;base64,{base64.b64encode(encoded()).decode()}", ""),
    ({"path": "good.png"}, ""),
]
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"images": ["good.png", "good.png"]}, "the row has 1 placeholder for 2 images"),
    ({"images": []}, NO_IMAGE),
    ({}, NO_IMAGE),
    ({"messages": [{"role": "user", "content": "<image>Who?\n<video>"}, SAID],
      "images": ["good.png"]},
     "message 0 of `messages` has the placeholder <video>, but models are trained on text and "),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
     "the row has 1 placeholder for 0 images"),
    ({"image": "good.png"}, ""),
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str]]:
    """The rows with what their errors say."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    PHOTO.save(tmp_path / "good.png")
    for number, (content, _) in enumerate(FILES):
        (tmp_path / f"{number}.img").write_bytes(content)
    values = [*((f"{number}.img", text) for number, (_, text) in enumerate(FILES)), *VALUES]
    made = [({"images": [value]}, text) for value, text in values]
    return [({"messages": TALK, **row}, text) for row, text in [*made, *ROWS]]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except RLHFError as error:
        return str(error)
    return ""


def test_each_odd_row_is_an_error_of_one_line_or_an_example(
    tmp_path: Path, rows: list[tuple[dict[str, Any], str]]
) -> None:
    assert len(rows) == 51
    model = qwen2_5_vl(tmp_path / "model")
    for row, text in rows:
        error = error_of(lambda row=row: examples(model, [row], tmp_path))  # type: ignore[misc]
        assert bool(error) == bool(text), (row, error)
        if text:
            assert error.startswith(f"{tmp_path}/rows.jsonl line 1: ")
            assert text in error
            assert error.endswith(", or set data.bad_images to drop")
            assert "\n" not in error
            assert len(error) < 500


def test_odd_rows_are_dropped_and_counted_and_no_other_row_is_lost(
    tmp_path: Path, rows: list[tuple[dict[str, Any], str]]
) -> None:
    bad = [number for number, (_, text) in enumerate(rows) if text]
    model, drop = qwen2_5_vl(tmp_path / "model"), ("--data.bad_images", "drop")
    data = prepared(model, [row for row, _ in rows], tmp_path, "sft", *drop)
    assert data.train.report.bad_images == len(bad)
    places = [int(data.train.name(each).rpartition(" ")[2]) - 1 for each in range(len(data.train))]
    assert places == [number for number in range(len(rows)) if number not in bad]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(rows[each][0]) + "\n" for each in bad))
    error = error_of(lambda: of_file(model, tmp_path / "bad.jsonl", "sft", *drop))
    assert error.startswith(
        f"data.train: no trainable rows left of {len(bad)}: {len(bad)} with bad images ("
    )
