"""Tree attention on CUDA by one kernel over the row (`attention_triton.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.model.kernels.ahead import Heads, await_compiled
from rlhf.model.masks import BLOCK, TreeMask


class Scoring(NamedTuple):
    """How a layer turns the products of queries and keys into shares of the values."""

    dropout: float
    scale: float | None
    """Factor on the products; None for 1 / sqrt(C)."""
    softcap: float | None
    """Bound of the scores (Gemma 2)."""
    sinks: Tensor | None
    """Scores without a value, which only take a share of the softmax [heads] (GPT-OSS)."""


def scale_of(query: Tensor, scoring: Scoring) -> float:
    """Return the factor on the products of queries [..., C] and keys."""
    return query.shape[-1] ** -0.5 if scoring.scale is None else float(scoring.scale)


def heads_of(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Heads:
    """Return what kernels are compiled for, given query [1, heads, T, C], key [1, KV heads, T, C]
    and value [1, KV heads, T, D]."""
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    return Heads(*sizes, query.dtype, scale_of(query, scoring), scoring.softcap)


def fused_tree(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
) -> Tensor:
    """Compute attention over a row of T tokens, a multiple of BLOCK, in one kernel.

    Sinks are applied to its output: with log-sum-exp L of a token's scores and a sink s, the real
    tokens keep the share exp(L) / (exp(L) + exp(s)) = sigmoid(L - s).
    """
    from rlhf.model.kernels.attention_triton import TreeAttention

    if not torch.compiler.is_compiling():
        await_compiled("forward")
    dropout, _, softcap, sinks = scoring
    if dropout > 0:
        raise RLHFError(
            f"tree attention on CUDA does not support attention dropout, but the model's is "
            f"{dropout}; set it to 0 in the model's config.json"
        )
    assert query.shape[2] % BLOCK == 0, "the row is not rounded up"
    scale = scale_of(query, scoring)
    output: Tensor
    output, lse = TreeAttention.apply(query, key, value, mask.bounds, scale, softcap)
    if sinks is not None:
        kept = torch.sigmoid(lse - sinks.view(1, -1, 1).float())
        output = output * kept.unsqueeze(-1).to(output.dtype)
    return output
