"""Which token sees which in a packed row: a tree per example, within a layer's window or chunk."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from rlhf.data.batch import PackedBatch
from rlhf.engine import Axis

BLOCK = 128
"""Tokens along each side of a block in flex attention's sparse mask (its default)."""

LONG = 6144
"""Mean tokens of the examples from which on one product per example is faster than one over the row
(measured on an H200: 1.0 to 1.1 times at 4,096, 1.2 at 8,192, 1.4 at 32,768)."""

Positions = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""A mask function of transformers: (batch, head, query position, key position) -> visible."""


class Tree:
    """The trees of one packed row of T tokens, as tensors on its device.

    - `owner` [T]: the example of a token. A token that only rounds T up is its own example, so
      that it sees only itself.
    - `branch`, `position` [T]: those of the batch.
    - `segment` [T]: number of the prompt or answer, counted along the row.
    - `prompt_of` [T]: the example whose prompt the token belongs to; -1 on an answer.
    - `lengths`: on the host, the number of tokens of each example, and last of the rest.
    - `sizes` [n]: the same, on the host, without the rest.
    - `chains`: whether each example has at most one answer, so that it is plainly causal.
    - `longest`: tokens of the longest path.
    - `long`: whether the row is a few long and plainly causal examples.
    - `sequence`: the ranks that divide the row.
    """

    def __init__(self, batch: PackedBatch, sequence: Axis | None = None) -> None:
        self.sequence = sequence or Axis()
        num_tokens = len(batch.tokens)
        row = torch.arange(num_tokens, device=batch.tokens.device)
        self.owner = torch.where(batch.example < 0, len(batch.spans) + row, batch.example).int()
        self.branch = batch.branch.int()
        self.position = batch.positions.int()
        # Rows hold the examples one after another, each prompt before its answers.
        changed = (self.owner.diff() != 0) | (self.branch.diff() != 0)
        self.segment = torch.nn.functional.pad(changed.cumsum(0, dtype=torch.int32), (1, 0))
        self.prompt_of = torch.where(self.branch == 0, self.owner, -1)
        sizes = [prompt + sum(answers) for prompt, answers in batch.spans]
        self.lengths = (*sizes, num_tokens - sum(sizes))
        self.sizes = torch.tensor(sizes, dtype=torch.long)
        self.chains = tuple(len(answers) <= 1 for _, answers in batch.spans)
        self.longest = max((p + max(a, default=0) for p, a in batch.spans), default=1)
        self.long = all(self.chains) and sum(sizes) >= LONG * len(sizes)


class TreeTokens(torch.Tensor):
    """The all-ones attention mask [1, T] of a packed row, which carries its tree through a model.

    A model that reads the mask sees one row without padding. The mask function registered by
    `rlhf.model.attention` takes the tree from it. Casts and views keep the tree, and all other
    operations drop it, so that the start-up probe detects a model that rebuilds its mask.
    """

    tree: Tree

    @classmethod
    def of(cls, tree: Tree) -> "TreeTokens":
        """Return the argument `attention_mask` of a forward over the row of `tree`."""
        ones = torch.ones(1, len(tree.owner), dtype=torch.bool, device=tree.owner.device)
        mask = ones.as_subclass(cls)
        mask.tree = tree
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        source = args[0] if args else None
        if (
            isinstance(result, cls)
            and isinstance(source, cls)
            and result.shape == source.shape
            and func in KEEPS_TREE
            and hasattr(source, "tree")
        ):
            result.tree = source.tree
        return result


KEEPS_TREE = {Tensor.to, Tensor.view, Tensor.reshape, Tensor.bool, Tensor.contiguous}


class TreeMask:
    """The mask of one kind of layer over one packed row; a layer's attention gets it as its mask.

    Token q sees token k if all of these hold: k is not later in the row; both belong to one
    example; k is in the prompt or on q's branch; the position of k is at least `lowest` [T] of q,
    the start of q's window or chunk.
    """

    def __init__(self, tree: Tree, lowest: Tensor | None) -> None:
        self.tree = tree
        self.windowed = lowest is not None
        self.long = tree.long and not self.windowed
        self.lowest = torch.zeros_like(tree.position) if lowest is None else lowest
        for item in (
            tree.owner,
            tree.segment,
            tree.prompt_of,
            tree.position,
            self.lowest,
            tree.sizes,
        ):
            mark_any_size(item, 0)
        self.visible = visible_function(tree, lowest)
        kind = tree.owner.device.type
        # In a rehearsal on the meta device nothing reads a mask.
        self.dense = () if kind in ("cuda", "meta") else dense_masks(self)
        # Built here, since layers may be compiled, and this need not be.
        self.blocks = block_mask(self) if kind == "cuda" else None


def visible_function(tree: Tree, lowest: Tensor | None) -> Positions:
    """Return the mask as flex attention's `mask_mod`. It reads everything from tensors, so that one
    compiled kernel serves all batches, and windows and chunks of any size."""
    owner, segment, prompt_of, position = tree.owner, tree.segment, tree.prompt_of, tree.position
    least = position if lowest is None else lowest

    def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        same_path = (segment[key] == segment[query]) | (prompt_of[key] == owner[query])
        return (key <= query) & same_path

    def visible_in_window(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (position[key] >= least[query])

    return visible if lowest is None else visible_in_window


def lowest_visible(tree: Tree, function: Positions) -> Tensor:
    """Return the lowest position that each token sees [T], by bisection over transformers' own mask
    function.

    Under causal, sliding and chunked masks a token sees an interval of positions that ends at
    itself. So the start of the interval describes the function.
    """
    device = tree.position.device
    query = torch.arange(tree.longest, device=device)
    none = torch.zeros(1, dtype=torch.long, device=device)
    low, high = torch.zeros_like(query), query.clone()
    for _ in range(tree.longest.bit_length()):
        middle = (low + high) // 2
        seen = function(none, none, query, middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
    # Llama 4's mask function computes with the padding mask, so its result is a TreeTokens, which
    # kernels cannot read.
    high = high.as_subclass(torch.Tensor)
    return high.int()[tree.position.long().clamp(max=tree.longest - 1)]


def dense_masks(mask: TreeMask) -> tuple[Tensor | None, ...]:
    """Return the mask [L, L] of each example; None if it is plainly causal."""
    masks: list[Tensor | None] = []
    start = 0
    for length, chain in zip(mask.tree.lengths, mask.tree.chains, strict=False):
        if chain and not mask.windowed:
            masks.append(None)
        else:
            row = torch.arange(start, start + length, device=mask.tree.owner.device)
            masks.append(mask.visible(None, None, row[:, None], row[None, :]))
        start += length
    return tuple(masks)


def block_mask(mask: TreeMask) -> BlockMask:
    """Return flex attention's sparse mask, from bounds per block and without a [T, T] tensor.

    A pair of blocks is left out if its bounds show that no token sees another, and full if they
    show that all do. Every other pair is partial: computed under `visible`. A pair may be partial
    needlessly, which costs time, but never left out or full wrongly.
    """
    length = len(mask.tree.owner)
    partial, full = block_kinds(mask)
    blocks = BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=mask.visible,
        seq_lengths=(length, length),
    )  # fmt: skip
    for item in blocks.as_tuple():
        if isinstance(item, Tensor):
            mark_any_size(item, *range(2, item.dim()))
    return blocks


def mark_any_size(tensor: Tensor, *dims: int) -> None:
    """Have torch.compile treat `dims` as unknown from the first row on. It would compile for the
    sizes of that row, and once more for the next row."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return of [Q, K] booleans the count [1, 1, Q] and the indices [1, 1, Q, K], chosen ones
    first, as int32."""
    indices = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    return chosen.sum(-1).int()[None, None].contiguous(), indices[None, None].contiguous()


def block_kinds(mask: TreeMask) -> tuple[Tensor, Tensor]:
    """Return which pairs of blocks [Q, K] are partial and which are full.

    A token q sees a token k if k <= q, both are on one path (same segment, or k in the prompt of
    q's example), and position(k) >= lowest(q). From the least (min) and greatest (max) value of
    each block follows, for a block Q of queries and a block K of keys:

    - Any pair may be visible only if K <= Q, max position(K) >= min lowest(Q), and
      max segment(K) >= min segment(Q) or max prompt_of(K) >= min owner(Q). Segments and owners
      grow along the row, so in an earlier block a smaller maximum means another path.
    - All pairs are visible if moreover K < Q, min position(K) >= max lowest(Q), Q and K have only
      one owner, and either only one segment or a K that is all prompt.

    Pairs of blocks are partial if they pass only the first rule.
    """
    tree = mask.tree
    first_lowest, last_lowest = bounds(mask.lowest)
    first_position, last_position = bounds(tree.position)
    block = torch.arange(len(first_lowest), device=tree.owner.device)
    any_visible = (
        (block[None, :] <= block[:, None])
        & may_share_path(tree)
        & (last_position[None, :] >= first_lowest[:, None])
    )
    all_visible = (
        any_visible
        & one_path(tree)
        & (block[None, :] < block[:, None])
        & (first_position[None, :] >= last_lowest[:, None])
    )
    return any_visible & ~all_visible, all_visible


def may_share_path(tree: Tree) -> Tensor:
    """Return for which pairs of blocks [Q, K] some query and key may be on one path."""
    first_owner, _ = bounds(tree.owner)
    first_segment, last_segment = bounds(tree.segment)
    _, last_prompt = bounds(tree.prompt_of)
    same_segment = last_segment[None, :] >= first_segment[:, None]
    # On answers prompt_of is -1, so a block's maximum is its last prompt.
    in_prompt = last_prompt[None, :] >= first_owner[:, None]
    return same_segment | in_prompt


def one_path(tree: Tree) -> Tensor:
    """Return for which pairs of blocks [Q, K] all queries and keys are on one path."""
    all_prompt, _ = bounds((tree.branch == 0).int())
    return uniform(tree.owner) & (uniform(tree.segment) | (all_prompt[None, :] == 1))


def uniform(values: Tensor) -> Tensor:
    """Return for which pairs of blocks [Q, K] all `values` [T], which grow along the row, are the
    same."""
    first, last = bounds(values)
    single = first == last
    return single[:, None] & single[None, :] & (first[:, None] == first[None, :])


def bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value of each block: [T] -> [T / BLOCK] twice; the last
    block may be short."""
    missing = -len(values) % BLOCK
    padded = torch.cat((values, values[-1:].expand(missing))).view(-1, BLOCK)
    return padded.amin(-1), padded.amax(-1)
