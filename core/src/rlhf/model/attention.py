"""Tree attention over packed rows, registered with transformers under the name `rlhf_tree`.

If the attention mask carries a tree, each kind of layer gets a TreeMask. If it does not, as in
generation and with padded rows, the model runs transformers' own SDPA.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlhf.errors import RLHFError
from rlhf.model.head import soft_capped
from rlhf.model.kernels.meta import MetaAttention
from rlhf.model.masks import BLOCK, TreeMask, TreeTokens, lowest_visible

NAME = "rlhf_tree"
"""Without "sdpa", "flash" or "flex" in it, for which transformers would run its own checks."""

COMPILED_KINDS = 64
"""Compiled forms of one function (kinds of layers times modes) before torch falls back to eager."""


def register() -> None:
    """Register `attn_implementation="rlhf_tree"` with transformers; may be repeated."""
    AttentionInterface.register(NAME, tree_attention)
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
    if kwargs.get("local_size") is None:
        return TreeMask(tree, None)
    return TreeMask(tree, lowest_visible(tree, kwargs["mask_function"]))


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
    [1, KV heads, T, D] -> [1, T, heads, D]. `softcap` bounds the scores (Gemma 2), `s_aux` [heads]
    are sinks (GPT-OSS)."""
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if isinstance(attention_mask, TreeMask):
        assert kwargs.get("position_bias") is None, "tree attention has no position bias"
        if query.device.type == "meta":
            output = MetaAttention.apply(query, key, value)
        else:
            attend = flex_tree if query.device.type == "cuda" else split_tree
            output = attend(query, key, value, attention_mask, dropout=dropout, **options)
    elif softcap is None and s_aux is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    else:
        output = attend_example(query, key, value, attention_mask, dropout=dropout, **options)
    return output.transpose(1, 2).contiguous(), None


def split_tree(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, **options: Any) -> Tensor:
    """Compute one product per example on the CPU: a dense mask of the whole row would take the
    square of its length."""
    lengths = list(mask.tree.lengths)
    *examples, rest = zip(
        *(part.split(lengths, dim=2) for part in (query, key, value)), strict=True
    )
    outputs = [
        attend_example(query, key, value, dense, **options)
        for (query, key, value), dense in zip(examples, mask.dense, strict=True)
    ]
    outputs.append(attend_self(*rest, **options))
    return torch.cat(outputs, dim=2)


def attend_self(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the outputs of tokens that only round the row up and see only themselves: their own
    value, less a sink's share.

    Scores stay in the graph with the factor 0. A filler batch must give query and key weights a
    gradient too, since all ranks sum the same gradients.
    """
    score = (query * repeat_heads(key, query)).sum(-1, keepdim=True)
    score = score * (query.shape[-1] ** -0.5 if scale is None else scale)
    score = soft_capped(score, softcap)
    share = 1 + 0 * score if sinks is None else torch.sigmoid(score - sinks.view(1, -1, 1, 1))
    return repeat_heads(value, query) * share.to(value.dtype)


def attend_example(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention of one example [1, heads, L, D], causal if `mask` [L, L] is None: by SDPA,
    or with explicit scores for soft caps and sinks, which SDPA does not have. A sink is a score
    without a value: it only takes a share of the softmax."""
    key, value = repeat_heads(key, query), repeat_heads(value, query)
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
            scale=scale,
        )  # fmt: skip
    scores = query @ key.transpose(2, 3)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = soft_capped(scores, softcap)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat((scores, sink), dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    shares = nn.functional.dropout(shares[..., : key.shape[2]], p=dropout)
    return shares @ value


def repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value [1, KV heads, L, D] -> [1, heads, L, D]."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def flex_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask,
    *,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute one compiled flex attention over the row on CUDA.

    Sinks are applied to its output: with log-sum-exp L of a token's scores and a sink s, the real
    tokens keep the share exp(L) / (exp(L) + exp(s)) = sigmoid(L - s).
    """
    if dropout > 0:
        raise RLHFError(
            f"tree attention on CUDA does not support attention dropout, but the model's is "
            f"{dropout}; set it to 0 in the model's config.json"
        )
    if torch.compiler.is_compiling():
        attend: Callable[..., Any] = partial(flex_blocks, scale=scale, score_mod=capped(softcap))
    else:
        attend = compiled_flex(scale, softcap)
    output, aux = attend(*(in_blocks(item, dim=2) for item in (query, key, value)), mask.blocks)
    if sinks is not None:
        kept = torch.sigmoid(aux.lse - sinks.view(1, -1, 1).float())
        output = output * kept.unsqueeze(-1).to(output.dtype)
    return output


def in_blocks(tensor: Tensor, dim: int) -> Tensor:
    """Return a view whose dimension `dim` of T tokens is split into T / BLOCK blocks and BLOCK
    tokens. A compiler for rows of any length then knows that T is a multiple of BLOCK."""
    return tensor.unflatten(dim, (-1, BLOCK))


def flex_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask | None,
    *,
    scale: float | None,
    score_mod: Callable[..., Tensor] | None,
) -> Any:
    """Compute flex attention over `in_blocks` of query, key and value, [1, heads, T / BLOCK, BLOCK,
    D]."""
    shared = query.shape[1] != key.shape[1]
    query, key, value = (tensor.flatten(2, 3) for tensor in (query, key, value))
    return flex_attention(
        query, key, value, block_mask=blocks, scale=scale, score_mod=score_mod,
        enable_gqa=shared, return_aux=AuxRequest(lse=True),
    )  # fmt: skip


@lru_cache
def compiled_flex(scale: float | None, softcap: float | None) -> Callable[..., Any]:
    """Return `flex_blocks`, compiled for the first row it meets and then once for rows of all
    lengths.

    torch makes dynamic only the sizes that have changed. With `dynamic=True` the sizes of heads and
    blocks would be unknown too.
    """
    let_recompile()
    return torch.compile(partial(flex_blocks, scale=scale, score_mod=capped(softcap)))


def let_recompile() -> None:
    """Allow as many compiled forms of one function as models have kinds of layers."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_KINDS)


def capped(softcap: float | None) -> Callable[..., Tensor] | None:
    """Return flex attention's `score_mod` for a soft cap."""
    if softcap is None:
        return None

    def cap(score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return soft_capped(score, softcap)

    return cap
