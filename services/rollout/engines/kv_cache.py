"""A key/value cache that is allocated once a block. It must never copy the past to append a token to it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, capacity, head_dim]; the model sees the filled part as a view.

    The prompt's pass keeps its own tensors; room for the whole completion is taken when its rows are repeated.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._key_room: torch.Tensor | None = None
        self._value_room: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._key_room is None or self._value_room is None:
            return super().update(key_states, value_states, *args, **kwargs)
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self._key_room[:, :, start:end] = key_states
        self._value_room[:, :, start:end] = value_states
        self._show(end)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times and take the room for the whole completion."""
        self._key_room = self._room(self.keys, repeats)
        self._value_room = self._room(self.values, repeats)
        self._show(self.keys.shape[2])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in `indices`."""
        if self._key_room is None or self._value_room is None:
            super().batch_select_indices(indices)
            return
        self._key_room = self._key_room.index_select(0, indices)
        self._value_room = self._value_room.index_select(0, indices)
        self._show(self.keys.shape[2])

    def _room(self, states: torch.Tensor, repeats: int) -> torch.Tensor:
        rows, heads, length, width = states.shape
        room = states.new_empty((rows * repeats, heads, self._capacity, width))
        room[:, :, :length].view(rows, repeats, heads, length, width).copy_(states[:, None])
        return room

    def _show(self, length: int) -> None:
        assert self._key_room is not None
        assert self._value_room is not None
        self.keys = self._key_room[:, :, :length]
        self.values = self._value_room[:, :, :length]


def make_cache(config: Any, capacity: int) -> Cache:
    """The model's standard cache with its plain attention layers made growing ones of `capacity` tokens.

    Layers of other kinds (sliding window, linear attention) stay as transformers made them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
