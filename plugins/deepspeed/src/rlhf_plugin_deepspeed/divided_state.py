"""Checkpoints of divided parameters: fragments of a rank's part become fragments of the whole
parameter, which any layout can read, and back."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from attrs import evolve
from torch import Tensor, nn

from rlhf.engine import Axis, Fragment, Mesh, SavedState
from rlhf_plugin_deepspeed.tensor import Part, part_of

STEP = "step"
"""The kind of fragment that is one number for a whole parameter."""


def of_whole(fragments: Iterable[Fragment], module: nn.Module, mesh: Mesh) -> Iterator[Fragment]:
    """Yield what this rank writes of `fragments` of its parts. Collective over the tensor axis."""
    parts = _parts(module)
    for item in fragments:
        part = parts.get(item.name)
        if part is None or item.kind == STEP:
            # Replicated fragments are shared out over all ranks later.
            yield item if item.replicated else _share(item, mesh.tensor)
            continue
        own = _share(item, mesh.shards) if item.replicated else item
        if part.dim == 0:
            yield evolve(own, offset=own.offset + part.axis.rank * part.size)
        else:
            yield from _columns(own, part)


class SavedParts:
    """A checkpoint as a rank with parts reads it: an `rlhf.engine.SavedState`."""

    def __init__(self, saved: SavedState, module: nn.Module) -> None:
        self.more: Mapping[str, Any] = saved.more
        self._saved = saved
        self._parts = _parts(module)

    def kinds(self, name: str) -> Collection[str]:
        """Return the kinds of values that the checkpoint has of a parameter."""
        return self._saved.kinds(name)

    def read(self, name: str, kind: str, offset: int, into: Tensor) -> None:
        """Fill `into`, flat, with the elements from `offset` on of this rank's part."""
        part = self._parts.get(name)
        if part is None or kind == STEP:
            self._saved.read(name, kind, offset, into)
        elif part.dim == 0:
            self._saved.read(name, kind, offset + part.axis.rank * part.size, into)
        else:
            # Whole rows, of which this rank has some columns.
            own = part.shape[1] // part.axis.size
            first, end = offset // own, -(-(offset + into.numel()) // own)
            rows = into.new_empty(end - first, part.shape[1])
            self._saved.read(name, kind, first * part.shape[1], rows.view(-1))
            columns = part.of(rows).view(-1)
            into.copy_(columns[offset - first * own :][: into.numel()])


def _parts(module: nn.Module) -> dict[str, Part]:
    parts = {name: part_of(parameter) for name, parameter in module.named_parameters()}
    return {name: part for name, part in parts.items() if part is not None}


def _share(item: Fragment, axis: Axis) -> Fragment:
    """Return this rank's share of a fragment that all ranks of the axis hold."""
    shares = item.values.tensor_split(axis.size)
    before = sum(share.numel() for share in shares[: axis.rank])
    return evolve(item, offset=item.offset + before, values=shares[axis.rank], replicated=False)


def _columns(item: Fragment, part: Part) -> Iterator[Fragment]:
    """Yield fragments of a whole matrix for a flat one of this rank's columns. Its ends may be
    parts of a row; the ranks of the axis share the whole rows between them."""
    axis, width = part.axis, part.shape[1]
    own = width // axis.size
    head = min(-item.offset % own, item.values.numel())
    rows = (item.values.numel() - head) // own
    tail = head + rows * own
    for start, values in ((0, item.values[:head]), (tail, item.values[tail:])):
        row, column = divmod(item.offset + start, own)
        yield evolve(item, offset=row * width + axis.rank * own + column, values=values)
    if rows:
        block = part.whole(item.values[head:tail].view(rows, own))
        first = (item.offset + head) // own
        share = _share(evolve(item, offset=first * width, values=block), axis)
        yield evolve(share, values=share.values.to("cpu", copy=True).view(-1))
