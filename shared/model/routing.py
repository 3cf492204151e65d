"""Watches the routers of a mixture of experts: counts the experts that they choose, and makes them choose given experts
(router replay, arXiv 2510.11370).

A router maps the hidden states of n rows to logits [n, E] of E experts, the weights [n, k] of the k experts that a row
uses, and their indices [n, k]. With given indices the weights are computed from the same logits, so the router keeps
its gradient. How logits become weights differs between families. `attach` proves the formula on a copy of the model's
own router with random weights, to the last bit, and accepts no router that it cannot reproduce.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from shared.topology.model_files import BYTE_EXPERTS

Array = np.ndarray[Any, np.dtype[Any]]
_ROWS = 64
_EPSILON = 1e-20
"""Added to the sum of weights or sigmoids before a division, as in DeepSeek-V3. It changes no bit of a softmax's."""


@dataclass(frozen=True)
class Gating:
    """How a family of routers turns logits into the weights of chosen experts."""

    sigmoid: bool
    """Whether experts are scored by sigmoids instead of one softmax."""
    normalises: bool
    """Whether the weights of a row are divided by their sum."""
    casts: bool
    """Whether the weights have the dtype of the logits."""
    scale: float

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights [n, k] of the experts `chosen` [n, k]."""
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1, dtype=_wide(logits))
        weights = scores.gather(1, chosen)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
        weights = weights * self.scale
        return weights.to(logits.dtype) if self.casts else weights

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities [n, E] of all experts, in float32 or float64. Sigmoids are divided by their sum, as
        in Megatron's load balance."""
        wide = logits.to(_wide(logits))
        if not self.sigmoid:
            return wide.softmax(-1)
        scores = wide.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + _EPSILON)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return float32, in which routers compute probabilities, or float64 for models in float64, which only tests
    have."""
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclass
class Routed:
    """The choices of L routers for the rows of a micro-batch. Each row counts as often as its weight.

    `counts` int64 [L, E] are the choices of each expert. `mass` [L, E] sums the probabilities, with a gradient.
    `entropy` sums the entropies of these, in nats, and `strayed` the shares of given experts that the router itself
    would not have chosen, both as means over the layers. `routes` int64 [n, L, k] are the choices of all rows.
    """

    counts: Tensor
    mass: Tensor
    entropy: Tensor
    strayed: Tensor
    routes: Tensor


@dataclass
class _Call:
    """One call of the model, whose rows have the `weights` [n] (None: nothing is counted) and may have `given` experts
    [n, L, k]. A list has an entry for each router."""

    weights: Tensor | None
    given: Tensor | None
    routes: list[Tensor | None]
    counts: list[Tensor] = field(default_factory=list)
    mass: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    strayed: list[Tensor] = field(default_factory=list)


class Routers:
    """The routers of a model, in the order of its layers. Nothing is watched outside `watching`."""

    def __init__(self, modules: list[nn.Module], gate: Gating) -> None:
        router = cast(Any, modules[0])
        self.layers, self.chosen, self.experts = len(modules), int(router.top_k), int(router.num_experts)
        self.gate = gate
        self.current: _Call | None = None
        for number, module in enumerate(modules):
            module.register_forward_hook(self._hook(number))

    @property
    def width(self) -> int:
        """Number of bytes of the routes of a token."""
        return self.layers * self.chosen * (1 if self.experts <= BYTE_EXPERTS else 2)

    def packed(self, routes: Tensor) -> Tensor:
        """Return the choices int64 [n, L, k] as uint8 [n, width]."""
        narrow = routes.flatten(1).to(torch.uint8 if self.experts <= BYTE_EXPERTS else torch.int16)
        return narrow.contiguous().view(torch.uint8)

    def unpacked(self, packed: Array) -> Array:
        """Return the choices int64 [n, L, k] of uint8 [n, width]. Raises ValueError if they are those of another
        model."""
        if packed.ndim != 2 or packed.shape[1] != self.width:
            raise ValueError(f"routes of shape {list(packed.shape)}: this model has {self.width} bytes for each token")
        narrow = packed if self.experts <= BYTE_EXPERTS else np.ascontiguousarray(packed).view("<u2")
        routes = narrow.astype(np.int64).reshape(len(packed), self.layers, self.chosen)
        if len(routes) and routes.max() >= self.experts:
            raise ValueError(f"routes name expert {routes.max()}, but a layer has {self.experts} experts")
        return routes

    @contextmanager
    def watching(self, call: _Call | None) -> Iterator[None]:
        """Watch the routers for `call`. None: watch nothing."""
        before, self.current = self.current, call
        try:
            yield
        finally:
            self.current = before

    def call(self, weights: Tensor | None, given: Tensor | None) -> _Call:
        return _Call(weights, given, [None] * self.layers)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Return the choices int64 [n, k] of each layer in the one call of the model inside. Nothing is counted."""
        call = self.call(None, None)
        with self.watching(call):
            yield cast(list[Tensor], call.routes)

    def _hook(self, number: int) -> Any:
        def watch(_: nn.Module, __: Any, output: Any) -> Any:
            call = self.current
            if call is None:
                return None
            logits, weights, own = output
            chosen = own
            if call.given is not None:
                chosen = call.given[:, number]
                weights = self.gate.weights(logits, chosen)
            first = call.routes[number] is None
            call.routes[number] = chosen.detach()
            if call.weights is not None:
                # A pass that is run again in the backward pass needs the same operations, but counts nothing.
                probabilities = self.gate.probabilities(logits)
                rows = call.weights.to(probabilities.dtype)
                mass = rows @ probabilities
                if first:
                    call.mass.append(mass)
                    self._count(call, rows, probabilities.detach(), own, chosen)
            return logits, weights, chosen

        return watch

    @torch.no_grad()
    def _count(self, call: _Call, weights: Tensor, probabilities: Tensor, own: Tensor, chosen: Tensor) -> None:
        times = weights.to(torch.int64)[:, None].expand_as(chosen)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=chosen.device)
        call.counts.append(counts.index_put_((chosen.flatten(),), times.flatten(), accumulate=True))
        call.entropy.append(weights @ torch.special.entr(probabilities).sum(-1))
        other = (chosen[:, :, None] != own[:, None, :]).all(-1).to(weights.dtype).mean(-1)
        call.strayed.append(weights @ other)


class RouterWatch:
    """The calls of the model for one micro-batch of N nodes. The rows of the calls follow one another in `slots`: the
    slot of each node, or None if the rows are the nodes."""

    def __init__(
        self, routers: Routers, weights: Tensor, given: Tensor | None, slots: Tensor | None, size: int
    ) -> None:
        """`weights` [N], `given` [N, L, k] and `slots` [N] are on the model's device; `size` is the number of rows of
        all calls."""
        if slots is not None:
            weights = weights.new_zeros(size).index_copy_(0, slots, weights)
            given = None if given is None else given.new_zeros(size, *given.shape[1:]).index_copy_(0, slots, given)
        self._routers, self._weights, self._given, self._slots = routers, weights, given, slots
        self._calls: list[_Call] = []
        self._begin = 0

    @contextmanager
    def over(self, rows: int) -> Iterator[None]:
        """Watch the next call, which has `rows` rows."""
        part = slice(self._begin, self._begin + rows)
        call = self._routers.call(self._weights[part], None if self._given is None else self._given[part])
        self._begin += rows
        self._calls.append(call)
        with self._routers.watching(call):
            yield

    def result(self) -> Routed:
        """Return what the routers did in all calls."""

        def total(lists: list[list[Tensor]]) -> Tensor:
            return torch.stack([torch.stack(parts).sum(0) for parts in zip(*lists, strict=True)])

        calls = self._calls
        routes = torch.cat([torch.stack(cast(list[Tensor], call.routes), 1) for call in calls])
        return Routed(
            total([call.counts for call in calls]),
            total([call.mass for call in calls]),
            total([call.entropy for call in calls]).mean(),
            total([call.strayed for call in calls]).mean(),
            routes if self._slots is None else routes[self._slots],
        )


def attach(model: nn.Module) -> str:
    """Find the routers of `model`, so that `routers_of` returns them. Return why they cannot be watched, or "".

    A dense model has none, and nothing is wrong with it. Call this before the parameters are divided among ranks.
    """
    found = _modules(model)
    cast(Any, model).routers = None
    if isinstance(found, str):
        return found
    if not found:
        return ""
    name = type(found[0]).__name__
    if any(type(module) is not type(found[0]) for module in found):
        return f"{type(model).__name__} has routers of several kinds"
    gate = _gate(found[0])
    if gate is None:
        return f"the weights of {name} are not those of a softmax or of sigmoids over its logits"
    cast(Any, model).routers = Routers(found, gate)
    return ""


def resuming(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that watches the routers again for the call of the model that is watched now."""
    routers = routers_of(model)
    if routers is None:
        return nullcontext
    return functools.partial(routers.watching, routers.current)


def routers_of(model: nn.Module) -> Routers | None:
    """Return the routers that `attach` has found."""
    return cast("Routers | None", getattr(model, "routers", None))


def _modules(model: nn.Module) -> list[nn.Module] | str:
    """Return the routers that the model's library declares, in order, or why the declaration cannot be used."""
    for module in model.modules():
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if declared is None:
            continue
        kind = getattr(declared, "target_class", None)
        routers = [part for part in model.modules() if kind is not None and isinstance(part, kind)]
        if not routers or not all(
            hasattr(part, name) for part in routers for name in ("top_k", "num_experts", "weight")
        ):
            return f"{type(model).__name__} does not declare a router with logits, weights and indices"
        return routers
    return []


@torch.no_grad()
def _gate(router: nn.Module) -> Gating | None:
    """Return the formula that gives the weights of `router` to the last bit, in its own dtype and in float32, or
    None."""
    trial: Any = copy.deepcopy(router).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in (*trial.parameters(), *trial.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    hidden = torch.randn(_ROWS, trial.weight.shape[-1], generator=generator)
    scale = float(getattr(trial, "routed_scaling_factor", 1.0))
    gates = [
        Gating(sigmoid=sigmoid, normalises=normalises, casts=casts, scale=scale)
        for sigmoid, normalises, casts in itertools.product((False, True), repeat=3)
    ]
    for dtype in (trial.weight.dtype, _wide(trial.weight)):
        try:
            logits, weights, chosen = trial.to(dtype)(hidden.to(dtype))
            made = [gate.weights(logits, chosen) for gate in gates]
        except (TypeError, ValueError, RuntimeError):
            return None
        pairs = zip(gates, made, strict=True)
        gates = [gate for gate, mine in pairs if mine.dtype == weights.dtype and torch.equal(mine, weights)]
    return gates[0] if gates else None
