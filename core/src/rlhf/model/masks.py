"""Who sees whom in a packed row: a tree per example, narrowed by a layer's window or chunk."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from rlhf.data.batch import PackedBatch

BLOCK = 128
"""Tokens on a side of a block of flex attention's sparse mask (its default)."""

Positions = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""A mask function of transformers: (batch, head, query position, key position) -> visible."""


class Tree:
    """The trees of one packed row of T tokens, as tensors on its device.

    `owner` [T] is the example of a token; a token that only rounds T up is an example of its own,
    so that it sees itself alone. `branch` and `position` [T] are those of the batch. `segment` [T]
    numbers prompts and answers along the row, `prompt_of` [T] is the example whose prompt a token
    belongs to, -1 on an answer. `lengths` are the tokens of each example on the host and, last, of
    the rest of the row.
    """

    def __init__(self, batch: PackedBatch) -> None:
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
        self.chains = tuple(len(answers) <= 1 for _, answers in batch.spans)
        self.longest = max((p + max(a, default=0) for p, a in batch.spans), default=1)


class TreeTokens(torch.Tensor):
    """The all-ones attention mask [1, T] of a packed row, which carries its tree through a model.

    A model that looks at the mask sees one row without padding; the mask function registered by
    `rlhf.model.attention` takes the tree from it. Casts and views keep the tree, all else drops it,
    and the start-up probe then finds the model out.
    """

    tree: Tree

    @classmethod
    def of(cls, tree: Tree) -> "TreeTokens":
        """The argument `attention_mask` of a forward over the row of `tree`."""
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

    Token q sees token k when k is not later in the row, both are of one example, k is on the prompt
    or on q's branch, and k's position is at least `lowest` [T] of q: the start of q's window or
    chunk.
    """

    def __init__(self, tree: Tree, lowest: Tensor | None) -> None:
        self.tree = tree
        self.windowed = lowest is not None
        self.lowest = torch.zeros_like(tree.position) if lowest is None else lowest
        self.visible = visible_function(tree, lowest)
        kind = tree.owner.device.type
        # Without values (a rehearsal) nothing looks at a mask.
        self.dense = () if kind in ("cuda", "meta") else dense_masks(self)
        # Made here, outside of what may be compiled.
        self.blocks = block_mask(self) if kind == "cuda" else None


def visible_function(tree: Tree, lowest: Tensor | None) -> Positions:
    """The mask as flex attention's `mask_mod`. It reads what it needs of a token from tensors, so
    that a compiled kernel serves all batches, and windows and chunks of any size."""
    owner, segment, prompt_of, position = tree.owner, tree.segment, tree.prompt_of, tree.position
    least = position if lowest is None else lowest

    def visible(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        same_path = (segment[key] == segment[query]) | (prompt_of[key] == owner[query])
        return (key <= query) & same_path

    def visible_in_window(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (position[key] >= least[query])

    return visible if lowest is None else visible_in_window


def lowest_visible(tree: Tree, function: Positions) -> Tensor:
    """The lowest position that each token sees [T], by bisection over transformers' own mask
    function.

    Causal, sliding and chunked masks all let a token see an interval of positions that ends at
    itself, so the function need not be taken apart.
    """
    device = tree.position.device
    query = torch.arange(tree.longest, device=device)
    none = torch.zeros(1, dtype=torch.long, device=device)
    low, high = torch.zeros_like(query), query.clone()
    for _ in range(tree.longest.bit_length()):
        middle = (low + high) // 2
        seen = function(none, none, query, middle)
        low, high = torch.where(seen, low, middle + 1), torch.where(seen, middle, high)
    # Llama 4's chunks count from the mask's own padding, and would hand its subclass to the
    # kernels.
    high = high.as_subclass(torch.Tensor)
    return high.int()[tree.position.long().clamp(max=tree.longest - 1)]


def dense_masks(mask: TreeMask) -> tuple[Tensor | None, ...]:
    """Of each example its own mask [L, L]; None where it is plainly causal."""
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
    """Flex attention's sparse mask, from bounds per block: never a [T, T] tensor.

    A block pair is left out when its bounds show that no token sees another, full when they show
    that all do, and partial (computed under `visible`) in between; the bounds may err towards
    partial.
    """
    length = len(mask.tree.owner)
    partial, full = block_kinds(mask)
    num_partial, partial_indices = ordered(partial)
    num_full, full_indices = ordered(full)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_indices,
        num_full,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask.visible,
        seq_lengths=(length, length),
    )


def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[Q, K] bool -> the count [1, 1, Q] and the indices [1, 1, Q, K], chosen ones first, as
    int32."""
    indices = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    return chosen.sum(-1).int()[None, None].contiguous(), indices[None, None].contiguous()


def block_kinds(mask: TreeMask) -> tuple[Tensor, Tensor]:
    """Which block pairs [Q, K] are partial and which are full."""
    tree = mask.tree
    # Both are sorted along the row.
    first_owner, last_owner = bounds(tree.owner)
    first_segment, last_segment = bounds(tree.segment)
    first_position, last_position = bounds(tree.position)
    first_lowest, last_lowest = bounds(mask.lowest)
    _, last_prompt = bounds(tree.prompt_of)
    whole_prompt, _ = bounds((tree.branch == 0).int())
    block = torch.arange(len(first_owner), device=tree.owner.device)
    earlier = block[None, :] <= block[:, None]
    shares = last_segment[None, :] >= first_segment[:, None]
    shares |= last_prompt[None, :] >= first_owner[:, None]
    some = earlier & shares & (last_position[None, :] >= first_lowest[:, None])
    one_owner = (first_owner[:, None] == last_owner[:, None]) & (
        (first_owner[None, :] == first_owner[:, None])
        & (last_owner[None, :] == first_owner[:, None])
    )
    one_segment = (first_segment[:, None] == last_segment[:, None]) & (
        first_segment[None, :] == first_segment[:, None]
    )
    whole = one_owner & (one_segment | (whole_prompt[None, :] == 1))
    full = some & whole & (block[None, :] < block[:, None])
    full &= first_position[None, :] >= last_lowest[:, None]
    return some & ~full, full


def bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each block: [T] -> [T / BLOCK] twice; the last may be short."""
    missing = -len(values) % BLOCK
    padded = torch.cat((values, values[-1:].expand(missing))).view(-1, BLOCK)
    return padded.amin(-1), padded.amax(-1)
