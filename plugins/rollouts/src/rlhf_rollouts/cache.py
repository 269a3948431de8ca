"""Keys, values and states of rows that each have their own length, as a cache of transformers.

Prompts are computed with a `prompt_cache`, several side by side. Each row of a `RowCache` then gets
a copy of what belongs to its prompt. Its tensors never move, so that a decode step can be captured
as a graph.
"""

from typing import Any

import torch
from attrs import define
from torch import Tensor
from transformers import Cache, DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

EMPTY: Any = getattr(cache_utils, "DummyLayer", ())
"""The class of layers that keep nothing, since transformers 5.18."""


@define(eq=False)
class Cursor:
    """Where a decode step writes and how far it reads."""

    positions: Tensor
    """The position of the token that each row reads, int64 [rows]."""
    used: int = 0
    """Keys that a step reads, at least one more than the highest position."""


class PromptLayer(DynamicLayer):
    """All keys and values of a layer with a window, which is left to its mask: with prompts of
    different lengths side by side, the last keys of the longest are not those of all."""

    is_sliding = True


class RowLayer(DynamicLayer):
    """Keys [rows, heads, length, D] and values of one layer, each row up to its own position."""

    def __init__(self, cursor: Cursor, keys: Tensor, values: Tensor, *, is_sliding: bool) -> None:
        super().__init__()
        self.cursor, self.keys, self.values = cursor, keys, values
        self.is_sliding = is_sliding
        self.is_initialized = True
        self._rows = torch.arange(len(keys), device=keys.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token [rows, heads, 1, D] per row and return what the step reads."""
        self.keys[self._rows, :, self.cursor.positions] = key_states[:, :, 0]
        self.values[self._rows, :, self.cursor.positions] = value_states[:, :, 0]
        used = self.cursor.used
        return self.keys[:, :, :used], self.values[:, :, :used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.used, 0

    def get_seq_length(self) -> int:
        return self.cursor.used - 1


class StateLayer(LinearAttentionLayer):
    """States of a recurrent layer, or of its convolution, by row."""

    def __init__(self, prompts: LinearAttentionLayer, rows: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=prompts.number_of_states)
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(prompts, kind).items():
                if state is not None:
                    blank = state.new_zeros(rows, *state.shape[1:])
                    LinearAttentionLayer.lazy_initialization(
                        self, **{kind: blank, "state_idx": number}
                    )
        self.has_previous_state = dict.fromkeys(range(prompts.number_of_states), True)


class RowAndStateLayer(StateLayer, RowLayer):
    """Both of a layer that has attention and a state."""

    def __init__(
        self, prompts: LinearAttentionAndFullAttentionLayer, cursor: Cursor, rows: int, length: int
    ) -> None:
        RowLayer.__init__(self, cursor, *blank_keys(prompts, rows, length), is_sliding=False)
        StateLayer.__init__(self, prompts, rows)


class RowCache(Cache):
    """The cache of decode steps: `rows` rows of at most `length` tokens, shaped as in the layers of
    `prompts`, a `prompt_cache` after a forward."""

    def __init__(self, prompts: Cache, cursor: Cursor, rows: int, length: int) -> None:
        self.cursor, self.length = cursor, length
        super().__init__(layers=[row_layer(one, cursor, rows, length) for one in prompts.layers])

    def put(self, rows: Tensor, prompts: Cache, sources: Tensor, lengths: Tensor) -> None:
        """Copy the prompts at `sources` into `rows`; those of `lengths` 0 have no states. All are
        int64 [n]."""
        for layer, source in zip(self.layers, prompts.layers, strict=True):
            if isinstance(layer, RowLayer):
                size = source.keys.shape[2]
                layer.keys[rows, :, :size] = source.keys[sources]
                layer.values[rows, :, :size] = source.values[sources]
            for state, other in zip(states_of(layer), states_of(source), strict=True):
                has_any = (lengths > 0).view(-1, *[1] * (state.ndim - 1))
                state[rows] = torch.where(has_any, other[sources], 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many keys a step reads besides its own, for models that make a mask of ones
        (OPT)."""
        return self.cursor.used - 1

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the positions of the rows, which `attention.row_mask` reads."""
        return self.cursor.positions


def prompt_cache(causal: Any) -> Cache:
    """Return an empty cache for prompts of a transformers model."""
    cache = DynamicCache(config=causal.config)
    cache.layers = [
        PromptLayer() if type(layer) is DynamicSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache


def unsupported_layers(causal: Any) -> list[str]:
    """Return the names of a model's cache layers that rows do not support."""
    supported = {
        DynamicLayer, PromptLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer,
    }  # fmt: skip
    layers = [layer for layer in prompt_cache(causal).layers if not isinstance(layer, EMPTY)]
    return sorted({type(layer).__name__ for layer in layers if type(layer) not in supported})


def has_states(cache: Cache) -> bool:
    """Return whether layers of a cache keep a state, which padding would change."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)


def row_layer(prompts: Any, cursor: Cursor, rows: int, length: int) -> Any:
    """Return the layer of a RowCache for a layer of prompts."""
    if isinstance(prompts, LinearAttentionAndFullAttentionLayer):
        return RowAndStateLayer(prompts, cursor, rows, length)
    if isinstance(prompts, LinearAttentionLayer):
        return StateLayer(prompts, rows)
    if isinstance(prompts, EMPTY):
        return prompts
    keys, values = blank_keys(prompts, rows, length)
    return RowLayer(cursor, keys, values, is_sliding=prompts.is_sliding)


def blank_keys(prompts: Any, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return zeros for the keys and values of a layer; a masked value must be finite."""
    return (
        prompts.keys.new_zeros(rows, prompts.keys.shape[1], length, prompts.keys.shape[3]),
        prompts.values.new_zeros(rows, prompts.values.shape[1], length, prompts.values.shape[3]),
    )


def states_of(layer: Any) -> list[Tensor]:
    """Return the states of a layer."""
    if not isinstance(layer, LinearAttentionLayer):
        return []
    found = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in found if state is not None]


def row_bytes(prompts: Cache, length: int) -> int:
    """Return the bytes of one row of `length` tokens."""
    total = 0
    for layer in prompts.layers:
        if isinstance(layer, DynamicLayer):
            for part in (layer.keys, layer.values):
                total += part.shape[1] * part.shape[3] * part.element_size() * length
        total += sum(state[0].numel() * state.element_size() for state in states_of(layer))
    return total
