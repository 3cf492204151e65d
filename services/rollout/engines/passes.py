"""The forward passes of one block, and the keys and values that they cache.

The passes use the model's own modules, or explicit code for models that are plain decoders. No pass changes a weight.
Rows are padded on the left, and no row attends to padding. Room for keys and values is allocated once per block, so
that appending a token never copies earlier tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from shared.model.load import passes_of
from shared.model.plain_decoder import Past, PlainDecoder, is_plain
from shared.model.routing import routers_of


class BlockPasses(Protocol):
    """Forward passes over rows. They start with `begin` or `gathered` and continue with `go_on` and `keep`.

    Logits have the shape [R, vocabulary].
    """

    routes: Tensor | None
    """The experts of the tokens of the last pass, uint8 [R, W] or, of prompts, [P, L, W]; None: they are not recorded
    (`shared.model.routing`)."""
    gathers: bool
    """Whether rows of several passes can be `gathered`. They cannot if a layer keeps anything other than the keys and
    values of every token."""

    def begin(self, ids_PL: Tensor, lengths: list[int]) -> Tensor:
        """Run the prompts and return their logits. `lengths` excludes padding."""

    def go_on(self, id_R: Tensor) -> Tensor:
        """Run one more token for every row and return the logits."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows for the passes that follow."""


Part = tuple[BlockPasses, Tensor]
"""Passes that have begun, and the indices of the rows to take from them, in order. A row may occur several times."""


def gathered(model: nn.Module, parts: Sequence[Part], room: int) -> BlockPasses:
    """Return passes in which all these rows continue together, with room for `room` more tokens each.

    The original passes must not be used afterwards. Keys and values are not recomputed. All rows end at the same
    column, and shorter rows are padded on the left. A part whose passes have `gathers` set to false must be the only
    part, and each of its rows must occur the same number of times.
    """
    return _kind(model).gathered(model, parts, room)


def make_passes(model: nn.Module, capacity: int) -> BlockPasses:
    """Return the passes for a model. `capacity` is the maximum number of tokens in a row."""
    return _kind(model)(model, capacity)


def _kind(model: nn.Module) -> type[PlainPasses | ModelPasses | SinglePasses]:
    if passes_of(model).sequences == "single":
        return SinglePasses
    return PlainPasses if is_plain(model) else ModelPasses


class ModelPasses:
    """Passes that use the modules of any model."""

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self._model: Any = model
        self._length = 0
        accepted = inspect.signature(model.forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in accepted}
        self._cache = make_cache(self._model.config, capacity)
        self._mask_RL: Tensor | None = None
        self._positions_R1 = torch.empty(0)
        self._routers = routers_of(model)
        self.routes: Tensor | None = None
        self.gathers = grows(self._cache)

    @classmethod
    def gathered(cls, model: nn.Module, parts: Sequence[Part], room: int) -> ModelPasses:
        mine = [(part, rows) for part, rows in parts if isinstance(part, ModelPasses)]
        if not mine[0][0].gathers:
            mine[0][0]._repeat(len(mine[0][1]) // len(mine[0][0]._positions_R1))
            return mine[0][0]
        places = _places([(part._length, part._positions_R1[:, 0], rows) for part, rows in mine])
        made = cls(model, places.length + room)
        made._length = places.length
        made._positions_R1 = places.positions_R[:, None]
        if int(places.start_R.max()):
            columns_L = torch.arange(places.length, device=places.start_R.device)
            made._mask_RL = (columns_L >= places.start_R[:, None]).long()
        gather(made._cache, [(part._cache, rows) for part, rows in mine], places.length)
        return made

    def begin(self, ids_PL: Tensor, lengths: list[int]) -> Tensor:
        positions_PL, valid_PL = _positions(ids_PL, lengths)
        self._length = ids_PL.shape[1]
        if min(lengths) != ids_PL.shape[1]:
            self._mask_RL = valid_PL.long()
        self._positions_R1 = positions_PL[:, -1:]
        return self._forward(ids_PL, positions_PL)

    def _repeat(self, samples: int) -> None:
        """Turn every prompt's row into `samples` rows."""
        self._cache.batch_repeat_interleave(samples)
        self._positions_R1 = self._positions_R1.repeat_interleave(samples, 0)
        if self._mask_RL is not None:
            self._mask_RL = self._mask_RL.repeat_interleave(samples, 0)

    def go_on(self, id_R: Tensor) -> Tensor:
        self._positions_R1 = self._positions_R1 + 1
        self._length += 1
        if self._mask_RL is not None:
            self._mask_RL = torch.cat([self._mask_RL, self._mask_RL.new_ones(len(id_R), 1)], 1)
        return self._forward(id_R[:, None], self._positions_R1)

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._positions_R1 = self._positions_R1[rows]
        if self._mask_RL is not None:
            self._mask_RL = self._mask_RL[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        extra: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        with nullcontext() if self._routers is None else self._routers.recording() as recorded:
            output = self._model(
                input_ids=ids,
                attention_mask=self._mask_RL,
                past_key_values=self._cache,
                use_cache=True,
                **{name: extra[name] for name in self._takes},
            )
        if self._routers is not None and recorded is not None:
            routes_NW = self._routers.packed(torch.stack(recorded, 1))
            self.routes = routes_NW if ids.shape[1] == 1 else routes_NW.view(*ids.shape, -1)
        logits: Tensor = output.logits[:, -1]
        return logits


class SinglePasses:
    """Passes for models whose result for a row depends on its length or on the other rows of a pass. Every row runs
    alone and whole for every token, without a cache, as the trainer scores it."""

    gathers = True
    routes: Tensor | None = None

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self._model: Any = model
        self._rows: list[Tensor] = []

    @classmethod
    def gathered(cls, model: nn.Module, parts: Sequence[Part], room: int) -> SinglePasses:
        made = cls(model, room)
        for part, rows in parts:
            if isinstance(part, SinglePasses):
                made._rows += [part._rows[row] for row in rows.tolist()]
        return made

    def begin(self, ids_PL: Tensor, lengths: list[int]) -> Tensor:
        self._rows = [ids_L[-length:] for ids_L, length in zip(ids_PL, lengths, strict=True)]
        return self._forward()

    def go_on(self, id_R: Tensor) -> Tensor:
        self._rows = [torch.cat([row, id_R[at : at + 1]]) for at, row in enumerate(self._rows)]
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def _forward(self) -> Tensor:
        return torch.stack([self._model(input_ids=row[None], use_cache=False).logits[0, -1] for row in self._rows])


class PlainPasses:
    """Passes that use `PlainDecoder`. Room for keys and values is allocated once, when rows are gathered."""

    gathers = True
    routes: Tensor | None = None

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self._decoder = PlainDecoder(model)
        self._capacity = capacity
        self._cos, self._sin = self._decoder.angles(capacity)
        self._pasts: list[Past] = []
        self._length = 0
        self._positions_R = torch.empty(0)
        self._bias = torch.zeros(1, 1, capacity)

    @classmethod
    def gathered(cls, model: nn.Module, parts: Sequence[Part], room: int) -> PlainPasses:
        mine = [(part, rows) for part, rows in parts if isinstance(part, PlainPasses)]
        places = _places([(part._length, part._positions_R, rows) for part, rows in mine])
        made = cls(model, places.length + room)
        made._length, made._positions_R = places.length, places.positions_R
        for layer in range(len(mine[0][0]._pasts)):
            keys = [(part._pasts[layer].keys, part._length, rows) for part, rows in mine]
            values = [(part._pasts[layer].values, part._length, rows) for part, rows in mine]
            made._pasts.append(
                Past(right_aligned(keys, places.length, room), right_aligned(values, places.length, room))
            )
        if int(places.start_R.max()):
            hidden_RL = torch.arange(places.length + room) < places.start_R[:, None]
            bias = torch.zeros(hidden_RL.shape).masked_fill_(hidden_RL, float("-inf"))
            made._bias = bias.repeat_interleave(made._pasts[0].keys.shape[1], 0)[:, None]
        return made

    def begin(self, ids_PL: Tensor, lengths: list[int]) -> Tensor:
        positions_PL, valid_PL = _positions(ids_PL, lengths)
        prompts, self._length = ids_PL.shape
        at_N, seen = positions_PL.reshape(-1), None
        if min(lengths) != self._length:
            causal = torch.ones(self._length, self._length, dtype=torch.bool).tril()
            # Padding attends to itself, because an empty row would be NaN.
            alone = torch.eye(self._length, dtype=torch.bool)
            seen = ((causal & valid_PL[:, None]) | alone)[:, None]
            self._bias = torch.zeros(prompts, 1, self._capacity)
            self._bias[:, 0, : self._length].masked_fill_(~valid_PL, float("-inf"))
        self._positions_R = positions_PL[:, -1]
        hidden, self._pasts = self._decoder.begin(ids_PL, self._cos[at_N], self._sin[at_N], seen)
        return self._decoder.logits(hidden[:, -1])

    def go_on(self, id_R: Tensor) -> Tensor:
        self._positions_R = self._positions_R + 1
        cos, sin = self._cos[self._positions_R], self._sin[self._positions_R]
        bias = self._bias[:, :, : self._length + 1]
        hidden = self._decoder.go_on(id_R, cos, sin, self._pasts, self._length, bias)
        self._length += 1
        return self._decoder.logits(hidden)

    def keep(self, rows: Tensor) -> None:
        self._pasts = [Past(self._kept(past.keys, rows), self._kept(past.values, rows)) for past in self._pasts]
        self._positions_R = self._positions_R[rows]
        if len(self._bias) > 1:
            heads = self._pasts[0].keys.shape[1]
            self._bias = self._bias.view(-1, heads, self._capacity)[rows].view(-1, 1, self._capacity)

    def _kept(self, room: Tensor, rows: Tensor) -> Tensor:
        _, heads, _, width = room.shape
        kept = room.new_empty(len(rows), heads, self._capacity, width)
        torch.index_select(room[:, :, : self._length], 0, rows, out=kept[:, :, : self._length])
        return kept


class _Places(NamedTuple):
    """The places of gathered rows, which end at column `length`: the first column of each row and the position of its
    last token."""

    length: int
    start_R: Tensor
    positions_R: Tensor


def _places(parts: Sequence[tuple[int, Tensor, Tensor]]) -> _Places:
    """Return the places of rows, given parts of the form (columns, position of each row's last token, rows to take)."""
    positions_R = torch.cat([positions[rows] for _, positions, rows in parts])
    length = int(positions_R.max()) + 1
    return _Places(length, length - 1 - positions_R, positions_R)


def _positions(ids_PL: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the position of each token, and whether it is a real token rather than padding."""
    longest = ids_PL.shape[1]
    column_L = torch.arange(longest)
    padding_P1 = longest - torch.tensor(lengths)[:, None]
    positions_PL = (column_L - padding_P1).clamp_(min=0).to(ids_PL.device)
    return positions_PL, (column_L >= padding_P1).to(ids_PL.device)


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
