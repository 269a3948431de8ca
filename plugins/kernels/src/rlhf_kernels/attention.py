"""Attention of packed rows: by a library if one is chosen, else by our kernel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf.kernels import Scoring, Tree, TreeMask
from rlhf_kernels.ahead import Ahead
from rlhf_kernels.libraries import LIBRARIES, Libraries
from rlhf_kernels.meta import MetaAttention
from rlhf_kernels.rows import Row
from rlhf_kernels.tree import Heads, fused_tree, heads_of, is_uneven


class Attention:
    """What a process knows of the attention of its rows."""

    def __init__(self) -> None:
        self.libraries = Libraries()
        self.ahead = Ahead()
        self.rehearsed: set[Heads] = set()
        """The kinds of attention that the rehearsal under way has met."""

    @contextmanager
    def rehearsing(self) -> Iterator[set[Heads]]:
        """Note the kinds of attention that rows on the meta device have in the body."""
        before, self.rehearsed = self.rehearsed, set()
        try:
            yield self.rehearsed
        finally:
            self.rehearsed = before

    def row(self, tree: Tree, *, windowed: bool) -> "AttentionRow":
        """Return what computes attention of a row, in layers with or without a window."""
        row = Row(tree, libraries=() if windowed else None)
        return AttentionRow(self, row, self.libraries.choose(row))


class AttentionRow:
    """The kernels for one row; `chosen` names the library of each kind of attention that has
    one."""

    def __init__(self, attention: Attention, row: Row, chosen: Mapping[Heads, str]) -> None:
        self.attention = attention
        self.row = row
        self.chosen = chosen
        self.split: dict[Heads, bool] = {}
        """Whether backward of our kernel is split, by the kind of attention."""

    def lengths(self) -> list[Tensor]:
        """Return the tensors whose sizes differ from row to row, besides the row's own."""
        return [self.row.sizes, *self.row.parts[:-1]]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scoring: Scoring
    ) -> Tensor:
        """See `rlhf.kernels.RowKernel`."""
        kind, plain = heads_of(query, key, value, scoring), is_plain(mask, scoring)
        if query.device.type == "meta":
            self.attention.rehearsed.add(kind)
            flash = plain and "flash" in self.row.libraries
            meta: Tensor = MetaAttention.apply(query, key, value, flash)
            return meta
        name = None
        if plain:
            if not torch.compiler.is_compiling():
                self.attention.libraries.kinds.add(kind)
            name = self.chosen.get(kind)
        if name is not None:
            return LIBRARIES[name].attend(query, key, value, self.row, kind.scale)
        if torch.compiler.is_compiling():
            return fused_tree(query, key, value, mask, scoring)
        self.attention.ahead.wait("forward")
        if kind not in self.split:
            self.split[kind] = not mask.windowed and is_uneven(self.row.spans, kind, query.device)
        output = fused_tree(query, key, value, mask, scoring, split=self.split[kind])
        self.attention.ahead.wait_in_backward(output)
        return output


def is_plain(mask: TreeMask, scoring: Scoring) -> bool:
    """Return whether a library could compute a layer: it has no window, soft cap, sinks or
    dropout."""
    return not (mask.windowed or scoring.softcap or scoring.dropout) and scoring.sinks is None
