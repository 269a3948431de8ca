"""Tree attention on CUDA by one kernel over the row (`attention_triton.py`)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.errors import RLHFError
from rlhf.kernels import BLOCK, Scoring, Spans, TreeMask, scale_of


class Heads(NamedTuple):
    """What the kernels of an attention are compiled for."""

    heads: int
    key_heads: int
    width: int
    """Numbers of a query and a key."""
    of_value: int
    """Numbers of a value."""
    dtype: torch.dtype
    scale: float
    softcap: float | None


def heads_of(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Heads:
    """Return what kernels are compiled for, given query [1, heads, T, C], key [1, KV heads, T, C]
    and value [1, KV heads, T, D]."""
    sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    return Heads(*sizes, query.dtype, scale_of(query, scoring), scoring.softcap)


def fused_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask,
    scoring: Scoring,
    *,
    split: bool = False,
) -> Tensor:
    """Compute attention over a row of T tokens, a multiple of BLOCK, in one kernel; with `split`,
    each head's part of the gradients of keys and values apart.

    Sinks are applied to its output: with log-sum-exp L of a token's scores and a sink s, the real
    tokens keep the share exp(L) / (exp(L) + exp(s)) = sigmoid(L - s).
    """
    dropout, _, softcap, sinks = scoring
    if dropout > 0:
        raise RLHFError(
            f"tree attention on CUDA does not support attention dropout, but the model's is "
            f"{dropout}; set it to 0 in the model's config.json"
        )
    assert query.shape[2] % BLOCK == 0, "the row is not rounded up"
    scale = scale_of(query, scoring)
    output: Tensor
    output, lse = TreeAttention.apply(query, key, value, mask.bounds, scale, softcap, split)
    if sinks is not None:
        kept = torch.sigmoid(lse - sinks.view(1, -1, 1).float())
        output = output * kept.unsqueeze(-1).to(output.dtype)
    return output


KEYS = 160
"""Keys of a tile of the longest program of backward: more than a tile has, since alone on its
multiprocessor it is slower."""

ROWS = 32
"""Tokens of one head whose gradient and output a program multiplies."""


class Tiles(NamedTuple):
    """A program keeps `kept` tokens, queries or keys, and reads the others `read` at a time."""

    kept: int
    read: int
    stages: int
    """Loads under way at the same time."""

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if self.kept * self.read > 64 * 64 else 4


class TreeAttention(torch.autograd.Function):
    """Output [1, heads, T, D] and log-sum-exp [1, heads, T] of query [1, heads, T, C], key
    [1, KV heads, T, C] and value [1, KV heads, T, D] under `bounds` [5, T] of a `TreeMask`; T is a
    multiple of 128. As FlashAttention-2 (Dao, arXiv 2307.08691), algorithms 1 and 2."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        scale: float,
        softcap: float | None,
        split: bool,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (_with_adjacent_numbers(tensor) for tensor in (query, key, value))
        output, lse = attend(query, key, value, bounds, scale, softcap)
        ctx.save_for_backward(query, key, value, bounds, output, lse)
        ctx.scale, ctx.softcap, ctx.split = scale, softcap, split
        return output, lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bounds, output, lse = ctx.saved_tensors
        changes = differentiate(
            _with_adjacent_numbers(gradient), of_lse.contiguous(), query, key, value, bounds,
            output, lse, ctx.scale, ctx.softcap, ctx.split,
        )  # fmt: skip
        return *changes, None, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of `TreeAttention`. On the meta device the kernel is
    compiled and not run."""
    from rlhf_kernels import attention_triton as kernels

    heads, tokens = query.shape[1:3]
    output = empty_row(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    tiles = forward_tiles(query, value)
    launch = _launcher(kernels.forward, (tokens // tiles.kept, heads), query)
    launch(
        query, key, value, output, lse, bounds, tokens,
        *_strides(query, key, value, output), **_options(query, key, value, scale, softcap),
        KEPT=tiles.kept, READ=tiles.read, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return output, lse


def differentiate(
    gradient: Tensor,
    of_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    split: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, see `fused_tree`. On the meta device kernels
    are compiled and not run."""
    from rlhf_kernels import attention_triton as kernels

    heads, tokens = query.shape[1:3]
    # g.o - h of each token.
    product = torch.empty_like(lse)
    width = value.shape[3]
    launch = _launcher(kernels.products, (tokens // ROWS, heads), query)
    launch(
        gradient, output, of_lse, product, tokens, *_strides(gradient, output),
        WIDTH=width, BLOCK=_columns(width), ROWS=ROWS,
    )  # fmt: skip
    # Heads whose parts of the gradients of keys and values a program sums.
    share = 1 if split else heads // key.shape[1]
    sums = heads // share
    of_query, of_key = empty_row(query, query.shape[3]), empty_row(key, key.shape[3], sums)
    of_value = empty_row(value, width, sums)
    tiles = backward_tiles(query, value)
    programs = (sums + heads) * (tokens // tiles.kept)
    launch = _launcher(kernels.backward, (programs,), query)
    launch(
        query, key, value, gradient, lse, product, of_query, of_key, of_value, bounds, tokens,
        share, *_strides(query, key, value, gradient, of_query, of_key, of_value),
        KEY_HEADS=key.shape[1], **_options(query, key, value, scale, softcap),
        KEPT=tiles.kept, READ=tiles.read, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split:
        parts = (part.unflatten(1, (key.shape[1], -1)) for part in (of_key, of_value))
        of_key, of_value = (part.sum(2) for part in parts)
    return of_query, of_key, of_value


def is_uneven(spans: Spans, kind: Heads, device: torch.device) -> bool:
    """Return whether backward is faster with `split`: where the keys that most queries see, such as
    those of a prompt with many answers, keep one program busy for longer than the multiprocessors
    have work on average (benchmarks/NOTES.md, Many answers to one prompt)."""
    group = kind.heads // kind.key_heads
    if group == 1 or device.type == "cpu":
        return False
    sizes = [prompt + sum(answers) for prompt, answers in spans]
    pairs = sum(
        prompt**2 / 2 + sum(answer * (prompt + answer / 2) for answer in answers)
        for prompt, answers in spans
    )
    properties = torch.get_device_module(device).get_device_properties(device)
    processors = properties.multi_processor_count
    work = 2 * kind.heads * (pairs + BLOCK * sum(sizes)) / processors
    return KEYS * group * max(sizes, default=0) > work


def _launcher(kernel: Any, grid: tuple[int, ...], query: Tensor) -> Any:
    return partial(kernel.warmup, grid=grid) if query.is_meta else kernel[grid]


def forward_tiles(query: Tensor, value: Tensor) -> Tiles:
    """Return tiles for a program of forward, which keeps queries."""
    width = max(query.shape[3], value.shape[3])
    return _fitting(Tiles(64, 64 if width <= 64 else 32, 3), query, value)


def backward_tiles(query: Tensor, value: Tensor) -> Tiles:
    """Return tiles for a program of backward, which keeps keys and values, or queries and the
    gradients of their outputs."""
    width = max(query.shape[3], value.shape[3])
    return _fitting(Tiles(128 if 64 < width <= 128 else 64, 64, 3), query, value)


def _fitting(tiles: Tiles, query: Tensor, value: Tensor) -> Tiles:
    """Return the tiles, smaller ones where shared memory is too small for them."""
    from rlhf_kernels.attention_triton import MEMORY

    columns = _columns(query.shape[3]) + _columns(value.shape[3])
    kept, read, stages = tiles
    # Products in float32 have no tensor cores: large tiles would only fill registers.
    if query.element_size() == 4:
        kept, read, stages = min(kept, 32), min(read, 32), 2
    while kept > 16 and query.element_size() * columns * (kept + stages * read) >= MEMORY:
        if stages > 2:
            stages -= 1
        elif kept > read:
            kept //= 2
        else:
            read //= 2
    return Tiles(kept, read, stages)


def _columns(width: int) -> int:
    """Return the columns of a tile for vectors of `width` numbers: Triton has powers of 2, and
    products need 16."""
    return max(16, 1 << (width - 1).bit_length())


def _with_adjacent_numbers(tensor: Tensor) -> Tensor:
    """Return the tensor with the numbers of a head adjacent in memory."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def empty_row(tensor: Tensor, width: int, heads: int | None = None) -> Tensor:
    """Return an empty [1, heads, T, width], in which the heads of a token are adjacent, for a
    tensor [1, heads, T, C] or with so many `heads`."""
    _, own, tokens, _ = tensor.shape
    return tensor.new_empty(1, tokens, heads or own, width).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the steps in memory from head to head and from token to token of each tensor."""
    return [tensor.stride(dim) for tensor in tensors for dim in (1, 2)]


def _options(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
) -> dict[str, Any]:
    width, of_value = query.shape[3], value.shape[3]
    is_tf32 = (
        query.dtype == torch.float32
        and torch.backends.cuda.matmul.allow_tf32
        and torch.version.hip is None
    )
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "SCALE": scale,
        "SOFTCAP": softcap or 0.0,
        "WIDTH": width,
        "OF_VALUE": of_value,
        "BLOCK": _columns(width),
        "BLOCK_OF_VALUE": _columns(of_value),
        "PRECISION": "tf32" if is_tf32 else "ieee",
    }
