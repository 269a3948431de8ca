"""Recurrent layers over packed rows: the final state of a prompt is the initial state of each of
its answers, and a convolution reads the tokens before on the path.

transformers calls convolutions and scans as functions of a family's module, with the decoder's
keyword `seq_idx`. `run_trees` replaces these functions. Where `seq_idx` is a `Segments` they
compute trees, by the original functions or a library's scan, else they are the original functions.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.engine import fused_on, on_device
from rlhf.kernels import Tree
from rlhf_kernels.paths import CHUNK, Links, Segment, ends_of, links_of
from rlhf_kernels.scans import Scans

CONVOLUTION = "causal_conv1d_fn"
SCANS = {
    "torch_chunk_gated_delta_rule": ("initial_state", "output_final_state"),
    "chunk_kimi_delta_attention": ("initial_state", "output_final_state"),
    "mamba2_chunk_scan": ("initial_states", "return_final_states"),
}
"""The scans, with their arguments for the initial states and for whether to return final ones."""
FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution and scan of Mamba 2 in one kernel; None in place of its result runs the two."""


class Group(NamedTuple):
    """Segments of a packed row that a scan computes at once. `parents` [S] are the indices of their
    prompts in the states of the groups before; None if they start paths."""

    parents: Tensor | None
    ends: Mapping[str, Tensor] = MappingProxyType({})
    """Arguments that say where segments end which lie end to end, as `ends_of` gives them."""


class Padded(NamedTuple):
    """Groups of segments of similar lengths, as rows."""

    groups: list[Group]
    places: list[Tensor]
    """The indices in the row of each group [S, L], the number of its tokens for padding."""
    back: Tensor
    """The index of each token in the groups laid end to end [T]."""

    def divide(self, row: Tensor) -> list[Tensor]:
        """Return what each group has [S, L, ...] of the tokens of a row [T, ...]."""
        padded = torch.cat((row, row.new_zeros(1, *row.shape[1:])))
        return [
            padded.index_select(0, one.flatten()).unflatten(0, one.shape) for one in self.places
        ]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the row of what the groups have."""
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self.back)


class Sequences(NamedTuple):
    """Groups of segments without padding, which lie end to end."""

    groups: list[Group]
    sizes: list[int]
    """The tokens of each group."""
    orders: tuple[Tensor, Tensor] | None
    """The order of the row's tokens in the groups [T] and its inverse; None if there is only one
    group, which has them as they are."""

    def divide(self, row: Tensor) -> list[Tensor]:
        """Return what each group has [1, L, ...] of the tokens of a row [T, ...]."""
        if self.orders is None:
            return [row[None]]
        return [part[None] for part in Reorder.apply(row, *self.orders).split(self.sizes)]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the row of what the groups have."""
        rows = [part.squeeze(0) for part in parts]
        if self.orders is None:
            return rows[0]
        return Reorder.apply(torch.cat(rows), *reversed(self.orders))


class Reorder(torch.autograd.Function):
    """Rows [N, ...] in another order. `back` is the inverse order, which backward takes: that of
    `index_select` adds rows up one by one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.back), None, None


class Segments:
    """The segments of a packed row's trees, in the order of the row; the decoder's `seq_idx`."""

    def __init__(self, tree: Tree, scans: Scans) -> None:
        self.scans = scans
        self.segments = list(segments_of(tree))
        self.num_tokens = len(tree.owner)
        self.device = tree.owner.device
        # All layers of a model have the same few widths and chunks.
        self._paths: dict[int, tuple[Tensor, Tensor]] = {}
        self._links: dict[int, Links] = {}
        self._padded: dict[int, Padded] = {}
        self._sequences: Sequences | None = None

    def paths(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the indices in the row of every segment with the `width` tokens before it on its
        path, T where there are none, and of each token in that list [T]."""
        if width not in self._paths:
            places: list[int] = []
            back: list[int] = []
            for tokens, parent in self.segments:
                before = () if parent is None else self.segments[parent].tokens[-width:]
                places += [self.num_tokens] * (width - len(before)) + [*before, *tokens]
                back += range(len(places) - len(tokens), len(places))
            self._paths[width] = self._tensor(places), self._tensor(back)
        return self._paths[width]

    def links(self, width: int) -> Links:
        """Return the links of the tokens over `width` steps."""
        if width not in self._links:
            self._links[width] = links_of(self.segments, width, self._tensor)
        return self._links[width]

    def padded(self, chunk: int) -> Padded:
        """Return the segments as rows, those that start a path first.

        The length of a group is a power of two of chunks, whatever else is in the row, so that a
        segment's chunks do not depend on its micro-batch.
        """
        if chunk not in self._padded:
            keys: dict[tuple[bool, int], list[int]] = {}
            for number, (tokens, parent) in enumerate(self.segments):
                chunks = -(-len(tokens) // chunk)
                length = chunk << (chunks - 1).bit_length()
                keys.setdefault((parent is not None, length), []).append(number)
            groups, rows_of, back, start = [], [], [0] * self.num_tokens, 0
            rows: dict[int, int] = {}  # The row of a segment in the states of all groups.
            for (follows, length), numbers in sorted(keys.items()):
                places = []
                for number in numbers:
                    tokens, _ = self.segments[number]
                    padding = [self.num_tokens] * (length - len(tokens))
                    # Zeros leave the state of zeros before a path as it is, but not a later one.
                    places.append([*tokens, *padding] if follows else [*padding, *tokens])
                    first = start + (0 if follows else len(padding))
                    back[tokens.start : tokens.stop] = range(first, first + len(tokens))
                    rows[number] = len(rows)
                    start += length
                groups.append(Group(self._parents(numbers, rows)))
                rows_of.append(self._tensor(places))
            self._padded[chunk] = Padded(groups, rows_of, self._tensor(back))
        return self._padded[chunk]

    def sequences(self) -> Sequences:
        """Return the segments without padding: one group of those that start a path, and one of
        those that follow."""
        if self._sequences is None:
            starts = [number for number, one in enumerate(self.segments) if one.parent is None]
            follow = [number for number, one in enumerate(self.segments) if one.parent is not None]
            rows = {number: row for row, number in enumerate(starts)}
            groups, sizes, order = [], [], []
            for numbers in filter(None, (starts, follow)):
                parts = [self.segments[number].tokens for number in numbers]
                order += [np.arange(part.start, part.stop) for part in parts]
                ends = {
                    name: self._tensor(values)
                    for name, values in ends_of([*map(len, parts)]).items()
                }
                groups.append(Group(self._parents(numbers, rows), ends))
                sizes.append(sum(map(len, parts)))
            orders = None
            if len(groups) > 1:
                places = np.concatenate(order)
                orders = self._tensor(places), self._tensor(np.argsort(places))
            self._sequences = Sequences(groups, sizes, orders)
        return self._sequences

    def _parents(self, numbers: list[int], rows: dict[int, int]) -> Tensor | None:
        """Return the `rows` of the prompts of segments; None if they start a path."""
        parents = (self.segments[number].parent for number in numbers)
        places = [rows[parent] for parent in parents if parent is not None]
        return self._tensor(places) if places else None

    def _tensor(self, values: Any) -> Tensor:
        if self.device.type == "meta":
            return torch.tensor(values, device=self.device)
        return on_device(values, self.device)


def segments_of(tree: Tree) -> Iterator[Segment]:
    """Yield the segments of a row; the tokens that only round it up are one more."""
    start = number = 0
    for prompt, answers in tree.spans:
        if len(answers) == 1:
            prompt, answers = prompt + answers[0], ()
        parent = number if prompt else None
        for length, before in [(prompt, None), *((answer, parent) for answer in answers)]:
            if length:
                yield Segment(range(start, start + length), before)
                start, number = start + length, number + 1
    if start < len(tree.owner):
        yield Segment(range(start, len(tree.owner)), None)


def computes_trees(model: Any) -> bool:
    """Return whether a transformers model has convolutions or scans that `run_trees` replaces."""
    names = {CONVOLUTION, *SCANS}
    return any(names & vars(module).keys() for module in code_of(model))


def run_trees(model: Any) -> None:
    """Have the convolutions and scans of a transformers model compute trees; may be repeated. It
    changes the modules of its family."""
    for module in code_of(model):
        functions = vars(sys.modules[module.__name__])
        for name in {CONVOLUTION, FUSED, *SCANS} & functions.keys():
            if functions[name].__module__ != __name__:
                functions[name] = tree_function(name, functions[name])


def code_of(model: Any) -> list[Any]:
    """Return the modules of Python that have the code of a model's layers."""
    return [sys.modules[name] for name in {type(part).__module__ for part in model.modules()}]


def tree_function(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in the place of `own`."""

    def function(*args: Any, **kwargs: Any) -> Any:
        segments = kwargs.get("seq_idx")
        if not isinstance(segments, Segments):
            return own(*args, **kwargs)
        del kwargs["seq_idx"]
        if name == FUSED:
            return None
        if name == CONVOLUTION:
            return tree_convolution(own, segments, *args, **kwargs)
        return tree_scan(name, own, segments, args, kwargs)

    return function


def tree_convolution(
    own: Callable[..., Tensor],
    segments: Segments,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Return `own` of `hidden_states` [1, C, T] with `weight` [C, width] along the paths of the
    tree."""
    options = {"bias": bias, "activation": activation}
    own = inspect.unwrap(own)
    run = library_of(CONVOLUTION, own, segments, (hidden_states, weight), options)
    steps = weight.shape[-1] - 1
    if run is not None:
        linked: Tensor = run(hidden_states, weight, **options, links=segments.links(steps))
        return linked
    places, back = segments.paths(steps)
    # Rows of tokens, as the layer had them before it transposed them.
    row = pad(hidden_states.squeeze(0).mT, (0, 0, 0, 1)).index_select(0, places).mT[None]
    output = own(row, weight, **options).squeeze(0).mT
    return output.index_select(0, back).mT[None]


def library_of(
    name: str,
    own: Callable[..., Any],
    segments: Segments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[..., Any] | None:
    """Return the library's function for the convolution or scan `name`, `own` in transformers; None
    if plain torch computes it."""
    if not fused_on(segments.device.type):
        return None
    return segments.scans.choose(name, own, args, kwargs)


def tree_scan(
    name: str,
    own: Callable[..., Any],
    segments: Segments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what the scan `name` returns, `own` in transformers, whose arguments of shape
    [1, T, ...] are of the row."""
    initial, final = SCANS[name]
    # transformers may have chosen a library itself, whose backward nothing has tried.
    own = inspect.unwrap(own)
    run = library_of(name, own, segments, args, kwargs)
    # Segments are shorter than the chunks of some families, which torch would fill up.
    chunk = min(kwargs.get("chunk_size", CHUNK), CHUNK)
    if run is None and "chunk_size" in kwargs:
        kwargs["chunk_size"] = chunk
    grouped = segments.sequences() if run else segments.padded(chunk)
    groups, row = grouped.groups, (1, segments.num_tokens)

    def parts(value: Any) -> Iterable[Any]:
        """Return what each group has of an argument of the row, and others whole."""
        if isinstance(value, Tensor) and value.dim() > 2 and value.shape[:2] == row:
            return grouped.divide(value.squeeze(0))
        return repeat(value, len(groups))

    divided = zip(*map(parts, (*args, *kwargs.values())), strict=True)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    # The library also returns states that nothing reads, if it is asked for them.
    read = run is None or any(group.parents is not None for group in groups)
    for group, values in zip(groups, divided, strict=True):
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        parents = group.parents
        named[initial] = None if parents is None else torch.cat(states).index_select(0, parents)
        named |= {**group.ends, final: read and (run is None or parents is None)}
        output, state = (run or own)(*values[: len(args)], **named)
        outputs.append(output)
        if parents is None:
            states.append(state)
    output = grouped.join(outputs)[None]
    return (output, None) if final == "output_final_state" else output
