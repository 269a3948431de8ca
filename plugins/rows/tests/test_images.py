"""Whether a row has images."""

from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_rows.images import has_images


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"image": "a.png"}, True),
        ({"images": [{"bytes": b"x"}]}, True),
        ({"images": [], "image": None, "text": "<image>"}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, True),
        ({"conversations": [{"from": "human", "value": [{"type": "image_url"}]}]}, True),
        ({"answers": [[{"role": "user", "content": [{"type": "input_image"}]}]]}, True),
        ({"messages": [{"role": "user", "content": [{"image": "a.png"}, {"text": "a"}]}]}, True),
        ({"messages": '[{"role": "user", "content": [{"type": "image"}]}]'}, True),
        ({"messages": '[{"role": "user", "content": "an \\"image\\""}]'}, False),
        ({"messages": '[{"image": no JSON'}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, False),
        ({"tools": [{"type": "image"}], "messages": [{"role": "user", "content": "a"}]}, False),
    ],
)
def test_images_are_found_in_columns_and_parts(row: Mapping[str, Any], expected: bool) -> None:
    assert has_images(row) is expected
