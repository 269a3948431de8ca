"""Tree attention over packed rows, registered with transformers under the name `rlhf_tree`.

If the attention mask carries a tree, each kind of layer gets a TreeMask. If it does not, as in
generation and with padded rows, the model runs transformers' own SDPA. Vision towers get
`image_attention`.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from rlhf.errors import RLHFError
from rlhf.model.accelerated import kernels_on
from rlhf.model.head import soft_capped
from rlhf.model.masks import Scoring, TreeMask, TreeTokens, lowest_visible, scale_of
from rlhf.model.sequence import part_of_rank, to_heads, to_tokens

NAME = "rlhf_tree"
"""Without "sdpa", "flash" or "flex" in it, for which transformers would run its own checks."""
OF_IMAGES = "rlhf_flash_images"
"""With "flash" in it, for which a vision tower passes the lengths of its images."""


class SeesLaterError(RLHFError):
    """No row can be packed in which tokens of an image see later ones."""


def register() -> None:
    """Register `attn_implementation="rlhf_tree"` with transformers; may be repeated."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionInterface.register(OF_IMAGES, image_attention)
    AttentionMaskInterface.register(NAME, tree_mask)


def tree_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Return the TreeMask of one kind of layer, or SDPA's own mask, as transformers' mask function.

    transformers calls it once per forward and kind of layer, with the kind's `mask_function` over
    positions. `local_size` is the window or chunk, if there is one.
    """
    tree = getattr(attention_mask, "tree", None)
    # `use_vmap`: the model adds its own pattern (for images, say), which positions do not
    # describe. It gets a plain mask, and the probe compares its results.
    if tree is None or kwargs.get("use_vmap"):
        if isinstance(attention_mask, TreeTokens):
            attention_mask = attention_mask.as_subclass(torch.Tensor)
        return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    windowed = kwargs.get("local_size") is not None
    lowest = lowest_visible(tree, kwargs["mask_function"]) if windowed else None
    if tree.owner.is_meta and not windowed and kwargs["mask_function"] is not causal_mask_function:
        raise SeesLaterError("tokens of its images see later ones, so that its rows are padded")
    kernels = kernels_on(tree.owner.device)
    row = None if kernels is None else kernels.row(tree, windowed=windowed)
    return TreeMask(tree, lowest, row)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' attention function: query [1, heads, T, D], key and value
    [1, KV heads, T, D] -> [1, T, heads, D]."""
    scoring = Scoring(dropout, scaling, softcap, s_aux)
    if isinstance(attention_mask, TreeMask):
        if kwargs.get("position_bias") is not None:
            raise ValueError("tree attention has no position bias")
        attend = row_attention if attention_mask.tree.sequence.size == 1 else divided_attention
        output = attend(query, key, value, attention_mask, scoring)
    elif query.is_meta and softcap is None and s_aux is None:
        if attention_mask is not None:
            key, value = repeat_heads(key, query), repeat_heads(value, query)
        states = (states.transpose(1, 2) for states in (query, key, value))
        return MetaAttention.apply(*states, attention_mask), None
    elif softcap is None and s_aux is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    else:
        output = attend_example(query, key, value, attention_mask, scoring)
    return output.transpose(1, 2).contiguous(), None


def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each image as transformers' attention function: query, key and value
    [1, heads, patches, C] -> [1, patches, heads, C]. Image n has the patches from the n-th of
    `cu_seq_lens_q` to the next. On CUDA one kernel computes all images, not a call for each."""
    if key.shape[1] != query.shape[1]:
        key, value = repeat_heads(key, query), repeat_heads(value, query)
    if query.is_meta:
        return MetaAttention.apply(query, key, value).transpose(1, 2).contiguous(), None
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    usual = not dropout and width % 8 == 0 and math.isclose(scaling or width**-0.5, width**-0.5)
    if cu_seq_lens_q is not None and usual and half and query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
        bounds = cu_seq_lens_q.int()
        most = int(bounds.diff().max() if max_length_q is None else max_length_q)
        return cast(Tensor, varlen_attn(q, k, v, bounds, bounds, most, most))[None], None
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    images = zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True)
    attend = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    return torch.cat([attend(*each) for each in images], 2).transpose(1, 2).contiguous(), None


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
) -> Tensor:
    """Compute attention of a whole row, by a kernel if one runs on its device."""
    if mask.row is not None:
        output: Tensor = mask.row.attend(query, key, value, mask, scoring)
        return output
    if query.device.type == "meta":
        return MetaAttention.apply(query, key, value)
    return split_tree(query, key, value, mask, scoring)


class MetaAttention(torch.autograd.Function):
    """What SDPA keeps for backward, on the meta device: its inputs, its output, a float per row,
    and a mask as what it adds to scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        added = None if mask is None else query.new_empty(mask.shape)
        ctx.save_for_backward(query, key, value, output, normaliser, added)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, normaliser, _ = ctx.saved_tensors
        # The real backward holds one more float per row while it runs.
        held = torch.empty_like(normaliser)
        changes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del held
        return *changes, *(None for _ in ctx.needs_input_grad[3:])


def divided_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
) -> Tensor:
    """Compute attention where each rank has a part of the row. Collective."""
    axis, heads = mask.tree.sequence, query.shape[1]
    query, key, value = (to_heads(states, axis, heads=heads) for states in (query, key, value))
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks[part_of_rank(heads, axis)])
    return to_tokens(row_attention(query, key, value, mask, scoring), axis)


def split_tree(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
) -> Tensor:
    """Compute one product per example in plain torch: a dense mask of the whole row would take the
    square of its length."""
    lengths = list(mask.tree.lengths)
    *examples, rest = zip(
        *(part.split(lengths, dim=2) for part in (query, key, value)), strict=True
    )
    outputs = [
        attend_example(query, key, value, dense, scoring)
        for (query, key, value), dense in zip(examples, mask.dense, strict=True)
    ]
    query, key, value = rest
    outputs.append(attend_self(query, key, value, scoring))
    return torch.cat(outputs, dim=2)


def attend_self(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return the outputs of tokens that only round the row up and see only themselves: their own
    value, less a sink's share.

    Scores stay in the graph with the factor 0. A filler batch must give query and key weights a
    gradient too, since all ranks sum the same gradients.
    """
    products = (query * repeat_heads(key, query)).sum(-1, keepdim=True)
    score, sinks = scores_of(products, query, scoring), scoring.sinks
    share = 1 + 0 * score if sinks is None else torch.sigmoid(score - sinks.view(1, -1, 1, 1))
    return repeat_heads(value, query) * share.to(value.dtype)


def attend_example(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Compute attention of one example [1, heads, L, D], causal if `mask` [L, L] is None: by SDPA,
    or with explicit scores for soft caps and sinks, which SDPA does not have."""
    key, value = repeat_heads(key, query), repeat_heads(value, query)
    sinks = scoring.sinks
    if scoring.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=scoring.dropout, is_causal=mask is None,
            scale=scoring.scale,
        )  # fmt: skip
    scores = scores_of(query @ key.transpose(2, 3), query, scoring)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat((scores, sink), dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    shares = nn.functional.dropout(shares[..., : key.shape[2]], p=scoring.dropout)
    return shares @ value


def scores_of(products: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
    """Return the scores, scaled and capped, of products of queries and keys."""
    return soft_capped(products * scale_of(query, scoring), scoring.softcap)


def repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value [1, KV heads, L, D] -> [1, heads, L, D]."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
