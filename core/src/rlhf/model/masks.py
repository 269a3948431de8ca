"""Which token sees which in a packed row: a tree per example, within a layer's window or chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.data.batch import PackedBatch
from rlhf.engine import Axis

BLOCK = 128
"""Rows for kernels of tree attention have a multiple of this many tokens."""

Positions = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""A mask function of transformers: (batch, head, query position, key position) -> visible."""


class Tree:
    """The trees of one packed row of T tokens, as tensors on its device.

    - `owner` [T]: the example of a token. A token that only rounds T up is its own example, so
      that in our kernel it sees only itself.
    - `branch`, `position` [T]: those of the batch.
    - `spans`: those of the batch, its prompts and answers.
    - `lengths`: on the host, the number of tokens of each example, and last of the rest.
    - `chains`: whether each example has at most one answer, so that it is plainly causal.
    - `longest`: tokens of the longest path.
    - `sequence`: the ranks that divide the row.
    """

    def __init__(self, batch: PackedBatch, sequence: Axis | None = None) -> None:
        self.sequence = sequence or Axis()
        num_tokens = len(batch.tokens)
        row = torch.arange(num_tokens, device=batch.tokens.device)
        self.owner = torch.where(batch.example < 0, len(batch.spans) + row, batch.example).int()
        self.branch = batch.branch.int()
        self.position = batch.positions.int()
        self.spans = batch.spans
        sizes = [prompt + sum(answers) for prompt, answers in batch.spans]
        self.lengths = (*sizes, num_tokens - sum(sizes))
        self.chains = tuple(len(answers) <= 1 for _, answers in batch.spans)
        paths = (prompt + max(answers, default=0) for prompt, answers in batch.spans)
        self.longest = max(paths, default=1)


class Scoring(NamedTuple):
    """How a layer turns the products of queries and keys into shares of the values.

    - `scale`: factor on the products; None for 1 / sqrt(C).
    - `softcap`: bound of the scores (Gemma 2).
    - `sinks` [heads]: scores without a value, which only take a share of the softmax (GPT-OSS).
    """

    dropout: float
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


def scale_of(query: Tensor, scoring: Scoring) -> float:
    """Return the factor on the products of queries [..., C] and keys."""
    return query.shape[-1] ** -0.5 if scoring.scale is None else float(scoring.scale)


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
        source = args[0] if args else None
        if isinstance(source, cls) and hasattr(source, "tree") and not kwargs:
            # Recurrent layers ask for `torch.all(mask == 1)`. On a GPU the host would wait for it.
            if func is Tensor.__eq__ and isinstance(args[1], int) and args[1] == 1:
                return source.bool()
            if func is torch.all and len(args) == 1:
                return torch.tensor(True)
        result = super().__torch_function__(func, types, args, kwargs or {})
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
    the start of q's window or chunk. So it sees two intervals of the row, `bounds` [5, T]:

    - 0, 1: where the part of its prompt that it sees starts and ends, for a token of an answer
    - 2: where the part of its own segment (its prompt or answer) starts that it sees, up to itself
    - 3: no token sees it from here on
    - 4: every token from itself up to here sees it

    `row` is the kernel that computes it, a `RowKernel`; None for plain torch.
    """

    def __init__(self, tree: Tree, lowest: Tensor | None, row: Any = None) -> None:
        self.tree = tree
        self.windowed = lowest is not None
        self.row = row
        kind = tree.owner.device.type
        if kind == "meta":  # In a rehearsal nothing reads a mask.
            self.bounds = tree.owner.new_empty(5, len(tree.owner))
        else:
            self.bounds = bounds(tree, lowest)
        self.dense = () if kind == "meta" or row is not None else dense_masks(self)

    def __getitem__(self, index: Any) -> "TreeMask":
        """Return the mask itself for full slices, as of `mask[:, :, slice(-T, None), :]`, which
        Gemma 4 takes of its row of T tokens. Raises TypeError for anything else."""
        sizes = (1, 1, len(self.tree.owner), len(self.tree.owner))
        kept = index if isinstance(index, tuple) else (index,)
        if any(
            not isinstance(part, slice) or range(size)[part] != range(size)
            for part, size in zip(kept, sizes, strict=False)
        ):
            raise TypeError("a TreeMask has no parts")
        return self

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which pairs of tokens, given by their indices in the row, see each other."""
        prompt_from, prompt_to, own_from, _, _ = self.bounds
        in_prompt = (key >= prompt_from[query]) & (key < prompt_to[query])
        return (key <= query) & ((key >= own_from[query]) | in_prompt)


def bounds(tree: Tree, lowest: Tensor | None) -> Tensor:
    """Return the `bounds` of a TreeMask [5, T], int32."""
    row = torch.arange(len(tree.owner), device=tree.owner.device)
    # Rows hold the examples one after another, each prompt before its answers.
    example_starts = pad(tree.owner.diff() != 0, (1, 0), value=True)
    segment_starts = example_starts | pad(tree.branch.diff() != 0, (1, 0))
    example = torch.where(example_starts, row, 0).cummax(0).values
    own_from = torch.where(segment_starts, row, 0).cummax(0).values
    on_answer = tree.branch > 0
    # Without a prompt the interval in it is empty.
    prompt_to = torch.where(on_answer, 0, row + 1).cummax(0).values.maximum(example)
    prompt_from = example
    if lowest is not None:
        own_from = own_from.maximum((row - tree.position + lowest).minimum(row))
        prompt_from = (example + lowest).minimum(prompt_to)
    prompt_from = torch.where(on_answer, prompt_from, own_from)
    prompt_to = torch.where(on_answer, prompt_to, own_from)

    def last_that_sees(sees_from: Tensor, query: Tensor) -> Tensor:
        return torch.zeros_like(row).scatter_reduce(0, sees_from, query, "amax").cummax(0).values

    in_segment = last_that_sees(own_from, row) + 1
    on_answers = last_that_sees(prompt_from, torch.where(prompt_from < prompt_to, row, -1)) + 1
    seen_to = torch.where(on_answer, in_segment, in_segment.maximum(on_answers))
    # Under a window, tokens in between may not see it.
    all_see_to = seen_to if lowest is None else in_segment
    return torch.stack((prompt_from, prompt_to, own_from, seen_to, all_see_to)).int()


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
            masks.append(mask.visible(row[:, None], row[None, :]))
        start += length
    return tuple(masks)
