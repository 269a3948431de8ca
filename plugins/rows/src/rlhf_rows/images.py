"""The images of a row, which `rlhf-vision` opens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlhf.formats import Columns
from rlhf.plugin import documented
from rlhf_rows.encoder import Unencoded

COLUMNS = ("image", "images")
PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are an image."""


@documented
class RowImages(Protocol):
    """The images of one row."""

    row: dict[str, Any]
    """The row without its images: where they stand, messages have a part `{"type": "image",
    "image": N}` with the number of the image in the row, from 0."""

    def expand(self, unencoded: Unencoded) -> Unencoded:
        """Return what the row format made of `row`, with as many placeholders in its texts as the
        model computes features of each image, and with an object of `TreeImages` as `images` of the
        `Row` that it becomes."""


def has_images(row: Columns) -> bool:
    """Return whether a row has images: in a column, or as parts of its messages."""
    return any(row.get(name) for name in COLUMNS) or any(map(_has_part, row.values()))


def _has_part(value: Any) -> bool:
    """Return whether a column of messages, perhaps as JSON, or of answers that are messages, has an
    image."""
    if isinstance(value, str) and value.lstrip().startswith("[{") and '"image' in value:
        try:
            value = json.loads(value)
        except ValueError:
            return False
    if isinstance(value, Mapping):
        content = value.get("content", value.get("value"))
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        mappings = [part for part in parts if isinstance(part, Mapping)]
        # Qwen's parts of images have no type.
        return any((p.get("type") or (p.get("image") and "image")) in PARTS for p in mappings)
    return isinstance(value, list) and any(map(_has_part, value))


def open_images(images: Any, row: Columns) -> RowImages | None:
    """Return the images of a row, opened by `images` of `RowFormat.open`; None if it has none."""
    opened: RowImages | None = images.open(row) if images and has_images(row) else None
    return opened
