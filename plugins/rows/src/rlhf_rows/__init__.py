"""The row formats of text and conversations, and what row formats of other distributions are made
of: rows of files become token ids for a trainer.

A format is a function `read(row, reader)` under the decorator `row_format`. It returns the rows
that a row becomes, as pairs of texts and a function.
"""

from rlhf.formats import Answer, Columns, Row, missing_columns
from rlhf.plugin import FormatPlugin
from rlhf_rows.columns import has, shown, type_name
from rlhf_rows.encoder import Encoded, Rendered, common_prefix
from rlhf_rows.format import Format, row_format
from rlhf_rows.images import RowImages, open_images
from rlhf_rows.messages import as_messages
from rlhf_rows.other_rows import with_our_columns
from rlhf_rows.tokens import (
    Reader,
    Unencoded,
    adds_bos,
    encode,
    join_paths,
    read_row,
    render_answers,
    render_conversation,
    render_prompt,
    render_text,
)

__all__ = [
    "Answer",
    "Columns",
    "Encoded",
    "Format",
    "Reader",
    "Rendered",
    "Row",
    "RowImages",
    "Unencoded",
    "adds_bos",
    "as_messages",
    "common_prefix",
    "encode",
    "has",
    "join_paths",
    "missing_columns",
    "open_images",
    "read_row",
    "render_answers",
    "render_conversation",
    "render_prompt",
    "render_text",
    "row_format",
    "shown",
    "type_name",
    "with_our_columns",
]

demonstration = FormatPlugin(read="rlhf_rows.formats:demonstrations")
preference = FormatPlugin(read="rlhf_rows.formats:preferences")
prompt = FormatPlugin(read="rlhf_rows.formats:prompts")
unpaired = FormatPlugin(read="rlhf_rows.formats:unpaired")
