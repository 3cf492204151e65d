"""A key/value cache that is allocated once per block, so that appending a token never copies earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values [rows, heads, capacity, head_dim]. The model sees the filled part as a view.

    The prompt pass keeps its own tensors. Room for the whole completion is allocated when the prompt rows are repeated.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._room is None:
            super().update(key_states, value_states, *args, **kwargs)
            return self.keys, self.values
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        return self._show(self._room, end)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times and allocate room for the whole completion."""
        self._room = (self._widened(self.keys, repeats), self._widened(self.values, repeats))
        self._show(self._room, self.keys.shape[2])

    def gather(self, parts: Sequence[tuple[GrowingLayer, torch.Tensor]], length: int) -> None:
        """Copy rows from other layers into the first `length` tokens of this layer."""
        room = self._capacity - length
        keys = right_aligned([(part.keys, part.keys.shape[2], rows) for part, rows in parts], length, room)
        values = right_aligned([(part.values, part.values.shape[2], rows) for part, rows in parts], length, room)
        self.lazy_initialization(keys, values)
        self._room = (keys, values)
        self._show(self._room, length)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in `indices`."""
        if self._room is None:
            super().batch_select_indices(indices)
            return
        keys, values = self._room
        self._room = (keys.index_select(0, indices), values.index_select(0, indices))
        self._show(self._room, self.keys.shape[2])

    def _widened(self, states: torch.Tensor, repeats: int) -> torch.Tensor:
        rows, heads, length, width = states.shape
        room = states.new_empty((rows * repeats, heads, self._capacity, width))
        room.view(rows, repeats, heads, self._capacity, width)[:, :, :, :length] = states[:, None]
        return room

    def _show(self, room: tuple[torch.Tensor, torch.Tensor], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (states[:, :, :length] for states in room)
        return self.keys, self.values


def make_cache(config: Any, capacity: int) -> Cache:
    """Return the model's standard cache, with growing layers of `capacity` tokens in place of plain attention layers.

    Layers of other kinds (sliding window, linear attention) are left as transformers created them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def grows(cache: Cache) -> bool:
    """Return whether every layer of the cache is a `GrowingLayer`."""
    return all(type(layer) is GrowingLayer for layer in cache.layers)


def gather(into: Cache, parts: Sequence[tuple[Cache, torch.Tensor]], length: int) -> None:
    """Fill a new cache with rows from other caches. `grows` must be true for all of them."""
    for number, layer in enumerate(into.layers):
        if isinstance(layer, GrowingLayer):
            of = [(cache.layers[number], rows) for cache, rows in parts]
            layer.gather([(part, rows) for part, rows in of if isinstance(part, GrowingLayer)], length)


def right_aligned(parts: Sequence[tuple[torch.Tensor, int, torch.Tensor]], length: int, room: int) -> torch.Tensor:
    """Join parts (states [.., heads, >= columns, width], columns, rows) into [rows, heads, length + room, width].

    The columns of each row end at `length`. They are preceded by zeros, because masked values must still be numbers.
    Columns that do not fit before `length` are padding and are cut off.
    """
    first = parts[0][0]
    total = sum(len(rows) for _, _, rows in parts)
    out = first.new_empty(total, first.shape[1], length + room, first.shape[3])
    begin = 0
    for states, columns, rows in parts:
        end, width = begin + len(rows), min(columns, length)
        target = out[begin:end]
        target[:, :, : length - width] = 0
        torch.index_select(states[:, :, columns - width : columns], 0, rows, out=target[:, :, length - width : length])
        begin = end
    return out
