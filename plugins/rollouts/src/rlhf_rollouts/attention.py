"""Attention of rows that each have their own length, registered with transformers as `rlhf_rows`.

A `RowCache` gives the position of every row as the offset of its query. All other calls, such as
those of prompts, are left to tree attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rlhf.rollouts import tree_attention, tree_mask

NAME = "rlhf_rows"
"""Without "sdpa", "flash" or "flex" in it, for which transformers would run its own checks."""


@contextmanager
def attention_of_rows(causal: Any) -> Iterator[None]:
    """Have a transformers model compute rows while the context lasts."""
    AttentionInterface.register(NAME, row_attention)
    AttentionMaskInterface.register(NAME, row_mask)
    implementation = causal.config._attn_implementation
    causal.set_attn_implementation(NAME)
    try:
        yield
    finally:
        causal.set_attn_implementation(implementation)


def row_mask(*args: Any, q_offset: int | Tensor = 0, **kwargs: Any) -> Any:
    """Return which keys each row sees [rows, 1, 1, keys], bool, as transformers' mask function.
    `q_offset` [rows] are the rows' positions, in a decode step."""
    if not isinstance(q_offset, Tensor):
        return tree_mask(*args, q_offset=q_offset, **kwargs)
    row = torch.arange(len(q_offset), device=q_offset.device)[:, None, None, None]
    key = torch.arange(kwargs["kv_length"], device=q_offset.device)
    query = q_offset[:, None, None, None]
    return kwargs["mask_function"](row, torch.zeros_like(row), query, key)


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' attention function: query [rows, heads, T, D], key and
    value [rows, KV heads, keys, D] -> [rows, T, heads, D]."""
    special = ("softcap", "s_aux", "position_bias")
    plain = all(kwargs.get(name) is None for name in special)
    if query.shape[2] > 1 or not isinstance(attention_mask, Tensor) or not plain:
        result: tuple[Tensor, None] = tree_attention(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    rows, heads, _, width = query.shape
    # The heads that share a key are the queries of one product, which reads the key once.
    query = query.reshape(rows, key.shape[1], -1, width)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1), None
