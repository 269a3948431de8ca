"""Tree attention on CUDA by one compiled flex attention over the row."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rlhf.errors import RLHFError
from rlhf.model.head import soft_capped
from rlhf.model.masks import BLOCK, TreeMask, mark_any_size

COMPILED_KINDS = 64
"""Compiled forms of one function (kinds of layers times modes) before torch falls back to eager."""


class Scoring(NamedTuple):
    """How a layer turns the products of queries and keys into shares of the values."""

    dropout: float
    scale: float | None
    """Factor on the products; None for 1 / sqrt(D)."""
    softcap: float | None
    """Bound of the scores (Gemma 2)."""
    sinks: Tensor | None
    """Scores without a value, which only take a share of the softmax [heads] (GPT-OSS)."""


def flex_tree(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
) -> Tensor:
    """Compute one compiled flex attention over the row on CUDA.

    Sinks are applied to its output: with log-sum-exp L of a token's scores and a sink s, the real
    tokens keep the share exp(L) / (exp(L) + exp(s)) = sigmoid(L - s).
    """
    dropout, scale, softcap, sinks = scoring
    if dropout > 0:
        raise RLHFError(
            f"tree attention on CUDA does not support attention dropout, but the model's is "
            f"{dropout}; set it to 0 in the model's config.json"
        )
    inputs = [in_blocks(item, dim=2) for item in (query, key, value)]
    if torch.compiler.is_compiling():
        attend: Callable[..., Any] = partial(flex_blocks, scale=scale, score_mod=capped(softcap))
        output, lse = attend(*inputs, mask.blocks)
    else:
        output, lse = flex_compiled(inputs, mask, compiled_flex(scale, softcap))
    if sinks is not None:
        kept = torch.sigmoid(lse - sinks.view(1, -1, 1).float())
        output = output * kept.unsqueeze(-1).to(output.dtype)
    return output


def flex_compiled(
    inputs: Sequence[Tensor], mask: TreeMask, attend: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    """Call a compiled `flex_blocks` as in training, also without gradient: a form for each would
    take several seconds more to compile."""
    trains = torch.is_grad_enabled() and any(item.requires_grad for item in inputs)
    detached = not (trains or torch.is_inference_mode_enabled())
    inputs = [item.detach().requires_grad_() for item in inputs] if detached else inputs
    for item in inputs:
        mark_any_size(item, 2)
    with torch.enable_grad() if detached else nullcontext():
        output, lse = attend(*inputs, mask.blocks)
    return (output.detach(), lse.detach()) if detached else (output, lse)


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
) -> tuple[Tensor, Tensor]:
    """Compute flex attention, and the log-sum-exp of its scores, over `in_blocks` of query, key and
    value, [1, heads, T / BLOCK, BLOCK, D]."""
    shared = query.shape[1] != key.shape[1]
    query, key, value = (tensor.flatten(2, 3) for tensor in (query, key, value))
    if blocks is not None:
        # A number from outside would be a constant of the compiled form.
        blocks.seq_lengths = (query.shape[2], key.shape[2])
    output, aux = flex_attention(
        query, key, value, block_mask=blocks, scale=scale, score_mod=score_mod,
        enable_gqa=shared, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None
    return output, aux.lse


@lru_cache
def compiled_flex(scale: float | None, softcap: float | None) -> Callable[..., Any]:
    """Return `flex_blocks`, compiled once for rows of all lengths.

    With `dynamic=True` the sizes of heads and blocks would be unknown too.
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
