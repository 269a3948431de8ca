"""Attention of rows of long examples by FlashAttention 4 (package flash-attn-4), on CUDA.

A row is computed in two passes: each segment, which is a prompt or an answer, by itself and
causally; then the answers to a shared prompt, whose tokens see all of it. With outputs O1 and O2
and log-sum-exps L1 and L2 of both passes' scores, attention over both is

    O = exp(L1 - L) * O1 + exp(L2 - L) * O2,    L = log(exp(L1) + exp(L2))

(Juravsky et al., arXiv 2402.05099), and the backward pass of FlashAttention, given O and L,
returns each pass's part of the gradients.
"""

import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kernels.tree import empty_row


class Pass(NamedTuple):
    """Which queries see which keys: those between the same two of `query_ends` and `key_ends`. In a
    causal pass both are the same."""

    query_ends: Tensor
    """[n + 1] in int32, from 0 on."""
    key_ends: Tensor
    most_queries: int
    """Most queries between two ends."""
    most_keys: int
    causal: bool

    @property
    def is_one_example(self) -> bool:
        """Whether the whole row is one plainly causal example."""
        return self.causal and len(self.query_ends) == 2


class Shared(NamedTuple):
    """The pass of answers to shared prompts."""

    answers: Tensor
    """The answers' tokens, by their indices in the row."""
    prompts: Tensor
    seen: Pass


def flash_row(
    query: Tensor, key: Tensor, value: Tensor, parts: list[Tensor], scale: float
) -> Tensor:
    """Compute attention of a row with the `layout` in `parts`: query [1, heads, T, C], key
    [1, KV heads, T, C] and value [1, KV heads, T, D] -> [1, heads, T, D]. Tokens behind the last
    example, which only round the row up, may see it: nothing reads their outputs."""
    output: Tensor = _attend(query, key, value, parts, scale)[0]
    return output


# Operators, since a compiler cannot see into FlashAttention.
@torch.library.custom_op("rlhf::flash_row", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, parts: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each token's scores [heads, T]."""
    q, k, v = (_by_token(tensor) for tensor in (query, key, value))
    within_segments, shared = _passes(parts)
    output, lse = attend(q, k, v, within_segments, scale)
    if shared is not None:
        answers, prompts, seen = shared
        of_prompts, prompts_lse = attend(q[answers], k[prompts], v[prompts], seen, scale)
        whole = torch.logaddexp(lse[:, answers], prompts_lse)
        share, rest = (
            (part - whole).exp().T.unsqueeze(-1) for part in (lse[:, answers], prompts_lse)
        )
        output[answers] = (output[answers] * share + of_prompts * rest).to(output.dtype)
        lse[:, answers] = whole
    return _by_head(output), lse


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[1:3], dtype=torch.float32)
    return empty_row(query, value.shape[3]), lse


@torch.library.custom_op("rlhf::flash_row_backward", mutates_args=())
def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    parts: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    row = [_by_token(tensor) for tensor in (gradient, query, key, value, output)]
    within_segments, shared = _passes(parts)
    changes = differentiate(row, lse, within_segments, scale)
    if shared is not None:
        answers, prompts, seen = shared
        places = (answers, answers, prompts, prompts, answers)
        picked = [tensor[place] for tensor, place in zip(row, places, strict=True)]
        more = differentiate(picked, lse[:, answers].contiguous(), seen, scale)
        for change, place, part in zip(changes, places[1:4], more, strict=True):
            change[place] += part
    of_query, of_key, of_value = (_by_head(change) for change in changes)
    return of_query, of_key, of_value


@_differentiate.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(empty_row(tensor, tensor.shape[3]) for tensor in (query, key, value))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, parts, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, *parts)


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    row, parts = saved[:5], list(saved[5:])
    return *_differentiate(gradient, *row, parts, ctx.scale), [None] * len(parts), None


_attend.register_autograd(_gradients, setup_context=_keep)


@cache
def _library() -> Any:
    """Import FlashAttention, which takes 2 s, and have it keep on disk what it compiles."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface

    # It warns about an argument that it does not use.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument")
    return interface


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Pass, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [heads, Q] of one pass: query [Q, heads, C], key
    [K, KV heads, C], value [K, KV heads, D]."""
    forward = partial(_library()._flash_attn_fwd, return_lse=True)
    output, lse, *_ = _call(forward, (query, key, value), seen, scale)
    return output, lse


def differentiate(
    row: Sequence[Tensor], lse: Tensor, seen: Pass, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value through one pass. `row` is the gradient of the
    output, query, key, value and output; the output and its log-sum-exp are those of all passes."""
    gradient, query, key, value, output = row
    deterministic = torch.are_deterministic_algorithms_enabled()
    backward = partial(_library()._flash_attn_bwd, deterministic=deterministic)
    tensors = query, key, value, output, gradient, lse
    of_query, of_key, of_value, *_ = _call(backward, tensors, seen, scale)
    return of_query, of_key, of_value


def _call(function: Any, tensors: Sequence[Tensor], seen: Pass, scale: float) -> Sequence[Any]:
    """Call a function of FlashAttention on tensors without a batch dimension."""
    options = {"softmax_scale": scale, "causal": seen.causal}
    if seen.is_one_example:  # The form without lengths is faster.
        found = function(*(tensor.unsqueeze(0) for tensor in tensors), **options)
        return [tensor if tensor is None else tensor.squeeze(0) for tensor in found]
    return function(
        *tensors, **options,
        cu_seqlens_q=seen.query_ends, max_seqlen_q=seen.most_queries,
        cu_seqlens_k=seen.key_ends, max_seqlen_k=seen.most_keys,
    )  # fmt: skip


def _passes(parts: list[Tensor]) -> tuple[Pass, Shared | None]:
    """Return the pass within segments, and that of answers to shared prompts if there are some."""
    ends, *indices, most = parts
    longest, *others = most.tolist()
    within_segments = Pass(ends, ends, longest, longest, causal=True)
    if not indices:
        return within_segments, None
    answers, prompts, answer_ends, prompt_ends = indices
    seen = Pass(answer_ends, prompt_ends, others[0], others[1], causal=False)
    return within_segments, Shared(answers, prompts, seen)


def _by_token(tensor: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D]"""
    return tensor[0].transpose(0, 1)


def _by_head(tensor: Tensor) -> Tensor:
    """[T, heads, D] -> [1, heads, T, D]"""
    return tensor.contiguous().transpose(0, 1).unsqueeze(0)
