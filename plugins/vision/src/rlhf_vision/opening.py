"""The images of a row, as users write them, become pictures in RGB; one that cannot be used is an
error of one line."""

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from rlhf.errors import first_line
from rlhf.formats import BadImage

MAX_PIXELS = 89_478_485
"""Pillow's own bound: the pixels of 0.25 GiB in RGB."""
LONGEST_NAME = 255
"""Characters of a file's name; longer text is not a name."""
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")
DROP = "or set data.bad_images to drop"


def open_image(name: str, value: Any, folder: Path | None, files: dict[str, str]) -> Image.Image:
    """Return the picture of a row's `value`, turned as its EXIF data say, in RGB.

    `value` is a path from `folder`, a data URL, bytes, a mapping with `bytes` or `path`, or an
    image of Pillow. A file that is read is added to `files` with its digest; without `folder` none
    is read. Raises BadImage, which calls the image by its `name`.
    """
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = value.get("path") if data is None else data
    if isinstance(value, str):
        value = _bytes_of(name, value, folder, files)
    if not isinstance(value, bytes | bytearray | Image.Image):
        raise BadImage(
            f"{name} is {_kind(value)}; give a path, the bytes of an image file, or a mapping with "
            f"`path` or `bytes`, {DROP}"
        )
    if not value:
        raise BadImage(f"{name} is empty; replace it, {DROP}", files)
    try:
        if isinstance(value, Image.Image):
            return _picture(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return _picture(name, Image.open(io.BytesIO(value)))
    except BadImage as error:
        raise BadImage(str(error), files) from None
    except UnidentifiedImageError:
        raise BadImage(
            f"{name} is not an image that Pillow can read; replace it, {DROP}", files
        ) from None
    except Image.DecompressionBombError:
        raise BadImage(_too_large(name), files) from None
    except Exception as error:  # A damaged file may raise anything.
        raise BadImage(
            f"{name} is damaged ({first_line(error)}); replace it, {DROP}", files
        ) from None


def name_of(number: int, value: Any) -> str:
    """Return what errors call the image of a row with this number, from 0, and this value."""
    text = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        return f"image {number + 1}"
    return f"image {number + 1} ({_cut(text, 40 if text.startswith('data:') else 80)})"


def _cut(text: str, most: int = 1000) -> str:
    """Return a text of at most `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def file_digest(path: str, folder: Path, known: str = "") -> str:
    """Return a digest of a file's content, then its size and time after a colon; empty text for a
    missing file. If size and time are those that are `known`, the content is not read."""
    try:
        stat = (folder / path).stat()
        stamp = f"{stat.st_size}:{stat.st_mtime_ns}"
        if known.partition(":")[2] == stamp:
            return known
        content = hashlib.sha256((folder / path).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return ""
    return f"{content}:{stamp}"


def _bytes_of(name: str, text: str, folder: Path | None, files: dict[str, str]) -> bytes:
    """Return the bytes of a file, or of a data URL."""
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except ValueError:  # Also for characters beyond ASCII.
            raise BadImage(f"{name} is not valid base64; replace it, {DROP}", files) from None
    if folder is None:
        raise BadImage(
            f"{name} is a URL or a path, and neither is read here; send the image as the data URL "
            "data:image/png;base64,..."
        )
    if "://" in text and not text.startswith("file://"):
        raise BadImage(
            f"{name} is a URL, and runs download no images; `rlhf fetch ROWS FOLDER` writes rows "
            f"with files in their place, {DROP}", files
        )  # fmt: skip
    if len(text) > LONGEST_NAME and BASE64.fullmatch(text):
        raise BadImage(
            f"{name} is base64 without a prefix; write it as `data:;base64,...`, {DROP}", files
        )
    text = text.removeprefix("file://")
    files[text] = ""
    try:
        data = (folder / text).read_bytes()
        stat = (folder / text).stat()
    except (OSError, ValueError) as error:  # ValueError: a path with a byte of zero.
        strerror = getattr(error, "strerror", None)
        reason = strerror.lower() if strerror else first_line(error)
        raise BadImage(
            f"{name} cannot be read from {_cut(str(folder / text))}: {reason}; correct the path, "
            f"{DROP}",
            files,
        ) from None
    files[text] = f"{hashlib.sha256(data).hexdigest()}:{stat.st_size}:{stat.st_mtime_ns}"
    return data


def _picture(name: str, image: Image.Image) -> Image.Image:
    """Return an image in RGB."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(_too_large(name))
    if not width * height:
        raise BadImage(f"{name} has {width} x {height} pixels; replace it, {DROP}")
    frames = getattr(image, "n_frames", 1)
    # The other pictures of an MPO, which phones write, are previews.
    if frames > 1 and image.format != "MPO":
        raise BadImage(
            f"{name} has {frames} frames, but a model reads one picture; save the frame that is "
            f"meant as an image, {DROP}"
        )
    if image.mode == "F":
        raise BadImage(f"{name} has pixels of floats; save it with 8 bits, {DROP}")
    if image.mode == "I" and image.format != "PPM":
        raise BadImage(
            f"{name} has integers of 32 bits or with a sign, and nothing says which of them is "
            f"white; save it with 8 or 16 bits, {DROP}"
        )
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow would cut 16 bits off at 255. Those of PGM files are in its mode I.
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _too_large(name: str) -> str:
    return f"{name} has more than {MAX_PIXELS:,} pixels; make it smaller, {DROP}"


def _kind(value: Any) -> str:
    return {"NoneType": "null", "list": "a list", "dict": "a mapping"}.get(
        type(value).__name__, f"a value of type {type(value).__name__}"
    )
