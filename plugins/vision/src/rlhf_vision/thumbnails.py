"""Small pictures of images, which reports show."""

import base64
import io

from PIL import Image

SIDE = 128
"""Pixels of the longer side."""
NUM_THUMBNAILS = 8
"""Images of a row that get one: about 5 kB each are kept with the row."""
QUALITY = 80


def thumbnail(picture: Image.Image) -> str:
    """Return a picture in RGB with at most `SIDE` pixels on the longer side, as a data URL in
    JPEG."""
    scale = min(1.0, SIDE / max(picture.size))
    width, height = (max(1, round(scale * side)) for side in picture.size)
    file = io.BytesIO()
    # The gap makes large pictures ten times as fast: they are reduced by a whole number first.
    picture.resize((width, height), reducing_gap=2.0).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
