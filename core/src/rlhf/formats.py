"""The border between core and row formats: a format reads the rows of files, and core makes trees
of what it returns. The distribution `rlhf-rows` has the formats of text and conversations, and what
a format of another distribution is made of."""

from rlhf.data.columns import Columns, errors_at, missing_columns
from rlhf.data.example import Answer
from rlhf.data.images import BadImage, ImageReader, TreeImages
from rlhf.data.rows import Row, RowFormat, RowReader
from rlhf.data.turns import PROBES, in_parts, special_tokens, turn_ending
from rlhf.registry.imports import demo_maker

__all__ = [
    "PROBES", "Answer", "BadImage", "Columns", "ImageReader", "Row", "RowFormat", "RowReader",
    "TreeImages", "demo_maker", "errors_at", "in_parts", "missing_columns", "special_tokens",
    "turn_ending",
]  # fmt: skip
