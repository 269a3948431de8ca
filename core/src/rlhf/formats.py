"""What the module of a row format imports: rows of a file become token ids for a trainer.

The record of a format (`rlhf.plugin.FormatPlugin`) names a function `read(row, reader)` that
returns the rows it becomes, as pairs of texts and a function. Core tokenises the texts of many rows
at once, and calls the function with their token ids; it returns a `Row`, which the trainer's
`example` gets.
"""

from rlhf.data.columns import Columns, has, missing_columns, shown, type_name
from rlhf.data.encode import Encoded, Rendered
from rlhf.data.example import Answer
from rlhf.data.images import BadImage, ImageReader, RowImages, TreeImages
from rlhf.data.messages import as_messages
from rlhf.data.tokens import (
    Reader,
    Row,
    Unencoded,
    join_paths,
    read_row,
    render_answers,
    render_conversation,
    render_prompt,
    render_text,
)
from rlhf.registry.imports import demo_maker

__all__ = [
    "Answer",
    "BadImage",
    "Columns",
    "Encoded",
    "ImageReader",
    "Reader",
    "Rendered",
    "Row",
    "RowImages",
    "TreeImages",
    "Unencoded",
    "as_messages",
    "demo_maker",
    "has",
    "join_paths",
    "missing_columns",
    "read_row",
    "render_answers",
    "render_conversation",
    "render_prompt",
    "render_text",
    "shown",
    "type_name",
]
