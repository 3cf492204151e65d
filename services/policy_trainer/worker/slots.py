"""The models of a server's clients: either adapters, in slots of one larger rank on all adapted layers of a model, or
all weights of the model.

A smaller adapter is padded with zeros: rows of A, columns of B, and whole layers. The padding changes neither outputs
nor gradients, and its own gradient is exactly 0, so that it stays 0 in every update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from proto.messages import AdapterSpec, ErrorCode
from services.policy_trainer.worker.training_state import TrainingState
from shared.model.adapter import A, AdapterStart, B, adapters_of, first_adapters
from shared.model.load import blocks_of
from shared.rpc.errors import RpcError
from shared.topology.lora import Lora

ATTENTION, MLP, UNEMBED = "attention", "mlp", "unembed"
_MARKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {ATTENTION: ("attn", "attention"), MLP: ("mlp", "feed_forward", "ffn")}
)
"""What occurs in the names of the modules inside a block, by the group to which their layers belong."""
_SLOTS = ("step", "exp_avg", "exp_avg_sq", "master")


class AdapterSlots:
    """The slots of a model, which has adapters of the slots' rank. Only `use` changes anything."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._layers = adapters_of(model)
        self._rank = rank
        inside = {id(module) for block in blocks_of(model) for module in block.modules()}
        self._groups = {name: _group(name) if id(layer) in inside else UNEMBED for name, layer in self._layers.items()}

    def check(self, spec: AdapterSpec) -> None:
        """Raise RpcError(bad_request) for an adapter that does not fit into a slot."""
        there = sorted(set(self._groups.values()))
        strange = next((name for name, group in self._groups.items() if not group), "")
        unknown = sorted(set(spec.groups) - set(there))
        if not 1 <= spec.rank <= self._rank:
            text = f"rank {spec.rank} of an adapter: it must be from 1 to {self._rank}, the rank of the slots"
        elif not 0 < spec.alpha < math.inf or not 0 <= spec.seed < 1 << 64:
            text = (
                f"an adapter with alpha {spec.alpha:g} and seed {spec.seed}: alpha is above 0, and a seed has 64 bits"
            )
        elif strange:
            text = f"layer {strange} belongs to no group that a client could choose; use another model"
        elif unknown or not spec.groups:
            given = unknown[0] if unknown else "none"
            text = f"adapters for the group {given}: this model has slots for {', '.join(there)}; choose some of them"
        else:
            return
        raise RpcError(ErrorCode.BAD_REQUEST, text)

    def use(self, spec: AdapterSpec) -> None:
        """Let the model compute with the scale of `spec`."""
        for layer in self._layers.values():
            layer.scale = spec.alpha / spec.rank

    def first(self, spec: AdapterSpec) -> TrainingState:
        """Return the state with which a new adapter begins."""
        chosen = {name: layer for name, layer in self._layers.items() if self._groups[name] in spec.groups}
        start = AdapterStart(Lora(rank=spec.rank, alpha=spec.alpha, export_merged=False), spec.seed)
        return self.padded(TrainingState(first_adapters(chosen, start), {}), spec)

    def trimmed(self, state: TrainingState, spec: AdapterSpec) -> TrainingState:
        """Return a state without the padding."""
        names = self._names(spec)
        weights = {name: _inside(name, state.weights[name], spec.rank).contiguous() for name in names}
        optimizer = {
            key: _inside(name, tensor, spec.rank).contiguous()
            for key, tensor in state.optimizer.items()
            if (name := key.partition("/")[2]) in weights
        }
        return TrainingState(weights, optimizer)

    def padded(self, state: TrainingState, spec: AdapterSpec) -> TrainingState:
        """Return a state with its padding. Raises RpcError(conflict) if it belongs to another adapter or base."""
        differ = sorted(state.weights.keys() ^ set(self._names(spec)))
        if differ:
            raise RpcError(ErrorCode.CONFLICT, f"another adapter or base: {differ[0]} is in only one of them")
        dtype = next(iter(state.weights.values())).dtype
        weights, optimizer = dict[str, Tensor](), dict[str, Tensor]()
        for module, layer in self._layers.items():
            shapes = {A: (self._rank, layer.in_features), B: (layer.out_features, self._rank)}
            for part, shape in shapes.items():
                name = f"{module}.{part}"
                weights[name] = _padded(name, state.weights.get(name), torch.zeros(shape, dtype=dtype), spec.rank)
                for key in (f"{slot}/{name}" for slot in _SLOTS):
                    if (given := state.optimizer.get(key)) is not None:
                        wide = torch.zeros(shape if given.ndim else (), dtype=given.dtype)
                        optimizer[key] = _padded(key, given, wide, spec.rank)
        return TrainingState(weights, optimizer)

    def _names(self, spec: AdapterSpec) -> list[str]:
        """Return the names of the tensors of an adapter."""
        modules = [name for name in self._layers if self._groups[name] in spec.groups]
        return [f"{module}.{part}" for module in modules for part in (A, B)]


class WholeModel:
    """Takes the place of `AdapterSlots` if clients train all weights of a model."""

    def check(self, spec: AdapterSpec) -> None:
        """Raise RpcError(bad_request) for an adapter."""
        if spec.rank or spec.groups:
            text = f"an adapter of rank {spec.rank}: these workers train all weights (serve.full_training)"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; ask for rank 0 and no group of layers")

    def use(self, spec: AdapterSpec) -> None:
        """Do nothing, because there is no scale."""

    def first(self, spec: AdapterSpec) -> None:
        """Return None: a new model has the weights of the model directory."""

    def trimmed(self, state: TrainingState, spec: AdapterSpec) -> TrainingState:
        return state

    def padded(self, state: TrainingState, spec: AdapterSpec) -> TrainingState:
        return state


Slots = AdapterSlots | WholeModel


def _padded(name: str, given: Tensor | None, slot: Tensor, rank: int) -> Tensor:
    """Copy `given`, if it is there, into its place in `slot`, and return the slot."""
    if given is not None:
        inside = _inside(name, slot, rank)
        if inside.shape != given.shape:
            shapes = f"{list(given.shape)}, but must be {list(inside.shape)}"
            raise RpcError(ErrorCode.CONFLICT, f"another adapter or base: {name} is {shapes}")
        inside.copy_(given)
    return slot


def _inside(name: str, slot: Tensor, rank: int) -> Tensor:
    """Return the part of a slot's tensor that is not padding."""
    if not slot.ndim:
        return slot
    return slot[:rank] if name.endswith(f".{A}") else slot[:, :rank]


def _group(name: str) -> str:
    """Return the group of a layer inside a block, or an empty string."""
    groups = (group for group, marks in _MARKS.items() if any(mark in name for mark in marks))
    return next(groups, "")
