"""Kernels of attention under the mask of packed trees, in one pass forward and one backward
(FlashAttention-2, Dao, arXiv 2307.08691).

A token sees two intervals of its row: of its prompt, and of its own segment up to itself. So a tile
of queries reads two runs of keys. Seen from a tile of keys, the queries are one run. A tile of keys
that all queries of a tile see is computed without a mask.

With the scores s = scale q.k of a token and their log-sum-exp L, its shares are p = exp(s - L).
Given the gradients g of the output o and h of L: dv = p g, ds = p (g.v - g.o + h).
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

MEMORY = (
    triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())[
        "max_shared_mem"
    ]
    if torch.cuda.is_available()
    else 64 * 1024
)
"""Bytes of shared memory that a program may use on this rank's device."""


@triton.jit
def _rows(
    tensor, row, stride, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """Return the rows [rows, BLOCK]; 0 behind the last token unless `WHOLE`."""
    column = tl.arange(0, BLOCK)
    place = tensor + row.to(tl.int64)[:, None] * stride + column[None, :]
    if WIDTH < BLOCK:
        inside = column[None, :] < WIDTH
        if not WHOLE:
            inside = inside & (row < tokens)[:, None]
        return tl.load(place, mask=inside, other=0.0)
    if not WHOLE:
        return tl.load(place, mask=(row < tokens)[:, None], other=0.0)
    return tl.load(place)


@triton.jit
def _store(tensor, row, stride, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = tensor + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(place, values.to(tensor.dtype.element_ty), mask=column[None, :] < WIDTH)


@triton.jit
def _scores(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the scores in units of log(2)."""
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1
        return (2 * tl.sigmoid(products * (2 * SCALE / SOFTCAP)) - 1) * (SOFTCAP * LOG2E)
    return products * (SCALE * LOG2E)


@triton.jit
def _uncapped_gradient(change, scores, SOFTCAP: tl.constexpr):
    """Return the gradient before the soft cap: its slope is 1 - tanh(x)^2."""
    if SOFTCAP > 0:
        share = scores * (1 / (SOFTCAP * LOG2E))
        return change * (1 - share * share)
    return change


@triton.jit
def _visible(query, key, prompt_from, prompt_to, own_from):
    in_prompt = (key >= prompt_from) & (key < prompt_to)
    return (key <= query) & ((key >= own_from) | in_prompt)


@triton.jit
def _seen(bounds, tokens, row):
    """Return, for each query, the start and the end of the visible part of its prompt, and the
    start of that of its own segment."""
    return (
        tl.load(bounds + row),
        tl.load(bounds + tokens + row),
        tl.load(bounds + 2 * tokens + row),
    )


@triton.jit
def _runs(bounds, tokens, first, prompt_from, own_from, KEPT: tl.constexpr, READ: tl.constexpr):
    """Return the two runs of keys that queries from `first` on see, in the prompt and from their
    segment on, in tiles of READ: of each the start, its end, how many tiles come before those that
    all queries see, how many these are, and how many follow."""
    start = tl.min(prompt_from)
    end = tl.maximum(tl.load(bounds + tokens + first), start)
    tiles = tl.cdiv(end - start, READ)
    before = tl.minimum(tl.cdiv(tl.max(prompt_from) - start, READ), tiles)
    full = tl.maximum((end - start) // READ - before, 0)

    own_start = tl.load(bounds + 2 * tokens + first)
    own_tiles = tl.cdiv(first + KEPT - own_start, READ)
    own_before = tl.minimum(tl.cdiv(tl.max(own_from) - own_start, READ), own_tiles)
    own_full = tl.maximum((first + 1 - own_start) // READ - own_before, 0)
    mixed, own_mixed = tiles - full, own_tiles - own_full
    return start, end, before, full, mixed, own_start, own_before, own_full, own_mixed


@triton.jit
def _full_tile(index, start, before, full, own_start, own_before, READ: tl.constexpr):
    """Return the first key of a tile that all queries see."""
    in_prompt = start + (before + index) * READ
    return tl.where(index < full, in_prompt, own_start + (own_before + index - full) * READ)


@triton.jit
def _mixed_tile(
    index, start, end, before, full, mixed, own_start, own_before, own_full, tokens,
    READ: tl.constexpr,
):  # fmt: skip
    """Return the first key of a tile that not all queries see, and the end of its run."""
    in_prompt = start + (index + tl.where(index < before, 0, full)) * READ
    index_of_own = index - mixed
    in_own = own_start + (index_of_own + tl.where(index_of_own < own_before, 0, own_full)) * READ
    return tl.where(index < mixed, in_prompt, in_own), tl.where(index < mixed, end, tokens)


@triton.jit
def _attend(
    q, key, value, key_stride, value_stride, at, end, row, prompt_from, prompt_to, own_from,
    total, highest, result,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, READ: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Return the sum of shares, the highest score and the output after one more tile of keys."""
    column = at + tl.arange(0, READ)
    k = _rows(key, column, key_stride, end, WIDTH, BLOCK, FULL)
    scores = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP)
    if not FULL:
        seen = _visible(
            row[:, None], column[None, :],
            prompt_from[:, None], prompt_to[:, None], own_from[:, None],
        ) & (column < end)[None, :]  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shares = tl.exp2(scores - new_highest[:, None])
    factor = tl.exp2(highest - new_highest)
    v = _rows(value, column, value_stride, end, OF_VALUE, BLOCK_OF_VALUE, FULL)
    result = tl.dot(shares.to(v.dtype), v, result * factor[:, None], input_precision=PRECISION)
    return total * factor + tl.sum(shares, 1), new_highest, result


@triton.jit
def forward(
    query, key, value, output, lse, bounds, tokens,
    query_heads, query_stride, key_heads, key_stride, value_heads, value_stride,
    output_heads, output_stride,
    GROUP: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr,
    OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, KEPT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    # Tokens late in their examples see the most: their programs start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * KEPT
    row = first + tl.arange(0, KEPT)
    prompt_from, prompt_to, own_from = _seen(bounds, tokens, row)
    start, end, before, full, mixed, own_start, own_before, own_full, own_mixed = _runs(
        bounds, tokens, first, prompt_from, own_from, KEPT, READ
    )
    q = _rows(query + head * query_heads, row, query_stride, tokens, WIDTH, BLOCK, True)
    k_rows = key + head // GROUP * key_heads
    v_rows = value + head // GROUP * value_heads
    total = tl.zeros((KEPT,), tl.float32)
    # Finite, since the difference of two infinities is NaN.
    highest = tl.full((KEPT,), -1e30, tl.float32)
    result = tl.zeros((KEPT, BLOCK_OF_VALUE), tl.float32)
    for index in range(full + own_full):
        at = _full_tile(index, start, before, full, own_start, own_before, READ)
        total, highest, result = _attend(
            q, k_rows, v_rows, key_stride, value_stride, at, tokens, row,
            prompt_from, prompt_to, own_from, total, highest, result,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, True,
        )  # fmt: skip
    for index in range(mixed + own_mixed):
        at, limit = _mixed_tile(
            index, start, end, before, full, mixed, own_start, own_before, own_full, tokens, READ
        )
        total, highest, result = _attend(
            q, k_rows, v_rows, key_stride, value_stride, at, limit, row,
            prompt_from, prompt_to, own_from, total, highest, result,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, False,
        )  # fmt: skip
    _store(
        output + head * output_heads, row, output_stride, result / total[:, None],
        OF_VALUE, BLOCK_OF_VALUE,
    )  # fmt: skip
    tl.store(lse + head * tokens + row, (highest + tl.log2(total)) / LOG2E)


@triton.jit
def products(
    gradient, output, of_lse, product, tokens,
    gradient_heads, gradient_stride, output_heads, output_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = _rows(gradient + head * gradient_heads, row, gradient_stride, tokens, WIDTH, BLOCK, True)
    o = _rows(output + head * output_heads, row, output_stride, tokens, WIDTH, BLOCK, True)
    place = head * tokens + row
    values = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1) - tl.load(of_lse + place)
    tl.store(product + place, values)


@triton.jit
def _for_query(
    q, g, lse, product, key, value, key_stride, value_stride, at, end,
    row, prompt_from, prompt_to, own_from, change,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, READ: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Return the gradient of queries after one more tile of keys."""
    column = at + tl.arange(0, READ)
    k = _rows(key, column, key_stride, end, WIDTH, BLOCK, FULL)
    v = _rows(value, column, value_stride, end, OF_VALUE, BLOCK_OF_VALUE, FULL)
    scores = _scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP)
    shares = tl.exp2(scores - lse[:, None])
    if not FULL:
        seen = _visible(
            row[:, None], column[None, :],
            prompt_from[:, None], prompt_to[:, None], own_from[:, None],
        ) & (column < end)[None, :]  # fmt: skip
        shares = tl.where(seen, shares, 0.0)
    of_shares = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    of_scores = _uncapped_gradient(shares * (of_shares - product[:, None]), scores, SOFTCAP)
    return tl.dot(of_scores.to(k.dtype), k, change, input_precision=PRECISION)


@triton.jit
def _for_key(
    k, v, query, gradient, lses, products, query_stride, gradient_stride, bounds, at, tokens,
    column, of_key, of_value,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, READ: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Return the gradients of keys and values after one more tile of queries."""
    row = at + tl.arange(0, READ)
    q = _rows(query, row, query_stride, tokens, WIDTH, BLOCK, FULL)
    g = _rows(gradient, row, gradient_stride, tokens, OF_VALUE, BLOCK_OF_VALUE, FULL)
    if FULL:
        lse, product = tl.load(lses + row), tl.load(products + row)
    else:
        inside = row < tokens
        lse = tl.load(lses + row, mask=inside, other=0.0)
        product = tl.load(products + row, mask=inside, other=0.0)
    scores = _scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), SCALE, SOFTCAP)
    shares = tl.exp2(scores - (lse * LOG2E)[None, :])
    if not FULL:
        prompt_from = tl.load(bounds + row, mask=inside, other=0)
        prompt_to = tl.load(bounds + tokens + row, mask=inside, other=0)
        own_from = tl.load(bounds + 2 * tokens + row, mask=inside, other=0)
        seen = _visible(
            row[None, :], column[:, None],
            prompt_from[None, :], prompt_to[None, :], own_from[None, :],
        ) & inside[None, :]  # fmt: skip
        shares = tl.where(seen, shares, 0.0)
    of_value = tl.dot(shares.to(g.dtype), g, of_value, input_precision=PRECISION)
    of_shares = tl.dot(v, tl.trans(g), input_precision=PRECISION)
    of_scores = _uncapped_gradient(shares * (of_shares - product[None, :]), scores, SOFTCAP)
    of_key = tl.dot(of_scores.to(q.dtype), q, of_key, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def _key_gradients(
    program, share, query, key, value, gradient, lse, product, of_key, of_value, bounds, tokens,
    query_heads, query_stride, key_heads, key_stride, value_heads, value_stride,
    gradient_heads, gradient_stride, of_key_heads, of_key_stride, of_value_heads, of_value_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, KEPT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Compute what `share` heads of a group add to the gradients of a tile of keys and values."""
    sums = KEY_HEADS * GROUP // share
    of_sum = (program % sums).to(tl.int64)
    first_head = of_sum * share
    head = first_head // GROUP
    first = program // sums * KEPT
    column = first + tl.arange(0, KEPT)
    k = _rows(key + head * key_heads, column, key_stride, tokens, WIDTH, BLOCK, True)
    v = _rows(
        value + head * value_heads, column, value_stride, tokens, OF_VALUE, BLOCK_OF_VALUE, True
    )
    change = tl.zeros((KEPT, BLOCK), tl.float32)
    change_of_value = tl.zeros((KEPT, BLOCK_OF_VALUE), tl.float32)
    # Queries of the tile itself, those that see all its keys, and those that see some.
    diagonal = tl.cdiv(KEPT, READ)
    end = tl.max(tl.load(bounds + 3 * tokens + column))
    full_end = tl.min(tl.load(bounds + 4 * tokens + column))
    full = tl.maximum((full_end - first) // READ - diagonal, 0)
    mixed = tl.cdiv(end - first, READ) - full
    for index in range(share * full):
        in_group = first_head + index // full
        change, change_of_value = _for_key(
            k, v, query + in_group * query_heads, gradient + in_group * gradient_heads,
            lse + in_group * tokens, product + in_group * tokens,
            query_stride, gradient_stride, bounds,
            first + (diagonal + index % full) * READ, tokens, column, change, change_of_value,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, True,
        )  # fmt: skip
    for index in range(share * mixed):
        in_group = first_head + index // mixed
        tile = index % mixed
        change, change_of_value = _for_key(
            k, v, query + in_group * query_heads, gradient + in_group * gradient_heads,
            lse + in_group * tokens, product + in_group * tokens,
            query_stride, gradient_stride, bounds,
            first + (tile + tl.where(tile < diagonal, 0, full)) * READ, tokens,
            column, change, change_of_value,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, False,
        )  # fmt: skip
    _store(of_key + of_sum * of_key_heads, column, of_key_stride, change * SCALE, WIDTH, BLOCK)
    _store(
        of_value + of_sum * of_value_heads, column, of_value_stride, change_of_value,
        OF_VALUE, BLOCK_OF_VALUE,
    )  # fmt: skip


@triton.jit
def _query_gradients(
    program, query, key, value, gradient, lse, product, of_query, bounds, tokens,
    query_heads, query_stride, key_heads, key_stride, value_heads, value_stride,
    gradient_heads, gradient_stride, of_query_heads, of_query_stride,
    GROUP: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, KEPT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries."""
    tiles = tokens // KEPT
    head = (program // tiles).to(tl.int64)
    first = (tiles - 1 - program % tiles) * KEPT
    row = first + tl.arange(0, KEPT)
    prompt_from, prompt_to, own_from = _seen(bounds, tokens, row)
    start, end, before, full, mixed, own_start, own_before, own_full, own_mixed = _runs(
        bounds, tokens, first, prompt_from, own_from, KEPT, READ
    )
    q = _rows(query + head * query_heads, row, query_stride, tokens, WIDTH, BLOCK, True)
    g = _rows(
        gradient + head * gradient_heads, row, gradient_stride, tokens,
        OF_VALUE, BLOCK_OF_VALUE, True,
    )  # fmt: skip
    own_lse = tl.load(lse + head * tokens + row) * LOG2E
    own_product = tl.load(product + head * tokens + row)
    k_rows = key + head // GROUP * key_heads
    v_rows = value + head // GROUP * value_heads
    change = tl.zeros((KEPT, BLOCK), tl.float32)
    for index in range(full + own_full):
        at = _full_tile(index, start, before, full, own_start, own_before, READ)
        change = _for_query(
            q, g, own_lse, own_product, k_rows, v_rows, key_stride, value_stride, at, tokens,
            row, prompt_from, prompt_to, own_from, change,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, True,
        )  # fmt: skip
    for index in range(mixed + own_mixed):
        at, limit = _mixed_tile(
            index, start, end, before, full, mixed, own_start, own_before, own_full, tokens, READ
        )
        change = _for_query(
            q, g, own_lse, own_product, k_rows, v_rows, key_stride, value_stride, at, limit,
            row, prompt_from, prompt_to, own_from, change,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, SCALE, SOFTCAP, PRECISION, READ, False,
        )  # fmt: skip
    _store(of_query + head * of_query_heads, row, of_query_stride, change * SCALE, WIDTH, BLOCK)


# One kernel for any share, also of 1, which Triton would compile apart.
@triton.jit(do_not_specialize=["share"])
def backward(
    query, key, value, gradient, lse, product, of_query, of_key, of_value, bounds, tokens, share,
    query_heads, query_stride, key_heads, key_stride, value_heads, value_stride,
    gradient_heads, gradient_stride, of_query_heads, of_query_stride,
    of_key_heads, of_key_stride, of_value_heads, of_value_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, OF_VALUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OF_VALUE: tl.constexpr,
    PRECISION: tl.constexpr, KEPT: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Programs for tiles of keys come first, since each runs through the queries of `share` heads
    of its group."""
    program = tl.program_id(0)
    of_keys = tokens // KEPT * (KEY_HEADS * GROUP // share)
    if program < of_keys:
        _key_gradients(
            program, share, query, key, value, gradient, lse, product, of_key, of_value,
            bounds, tokens, query_heads, query_stride, key_heads, key_stride,
            value_heads, value_stride, gradient_heads, gradient_stride, of_key_heads, of_key_stride,
            of_value_heads, of_value_stride, KEY_HEADS, GROUP, SCALE, SOFTCAP,
            WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, PRECISION, KEPT, READ,
        )  # fmt: skip
    else:
        _query_gradients(
            program - of_keys, query, key, value, gradient, lse, product, of_query, bounds, tokens,
            query_heads, query_stride, key_heads, key_stride, value_heads, value_stride,
            gradient_heads, gradient_stride, of_query_heads, of_query_stride,
            GROUP, SCALE, SOFTCAP, WIDTH, OF_VALUE, BLOCK, BLOCK_OF_VALUE, PRECISION, KEPT, READ,
        )  # fmt: skip
