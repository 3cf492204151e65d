"""The parts that processes keep on shared devices, and the pairs that must not be there at the same time.

The module is pure: it does not move memory, call services or read the clock.

The order of a step is not stated explicitly; it follows from `FORBIDDEN`. The optimizer and the gradients leave before
the engine's weights arrive, the parameters and the frozen models leave before the engine's key/value cache arrives, and
the whole engine leaves before the gradients return. A critic has left before the engine's weights arrive, and its
update and the policy's take turns. "Device" means GPU memory on CUDA, and host memory otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import combinations, product
from types import MappingProxyType
from typing import Literal

from shared.topology.models import FROZEN, POLICY, WORKERS

Holder = tuple[str, int]
"""(service, instance) of a process."""
Parts = frozenset[str]
Part = Literal["parameters", "gradients", "optimizer"]
"""A part of a trained model that a backend can move. float32 masters belong to `optimizer` if they are separate
tensors."""
PARTS: frozenset[Part] = frozenset({"parameters", "gradients", "optimizer"})

WEIGHTS = "engine.weights"
KV_CACHE = "engine.kv_cache"
NOTHING: Parts = frozenset()
ENGINE: Parts = frozenset({WEIGHTS, KV_CACHE})


def trained_parts(model: str) -> tuple[str, str, str]:
    """Return the parameters, gradients and optimizer state of a trained model."""
    return f"{model}.parameters", f"{model}.gradients", f"{model}.optimizer"


def frozen_part(model: str) -> str:
    """Return the only part of a frozen model: its parameters."""
    return f"{model}.parameters"


def parts_of(models: Mapping[str, str]) -> Mapping[str, Parts]:
    """Return the parts that the processes of each service hold. `models` are the trained models with their services."""
    trained = {service: frozenset(trained_parts(model)) for model, service in models.items()}
    frozen = {service: frozenset({frozen_part(service)}) for service in FROZEN}
    return MappingProxyType({**trained, **frozen, "rollout": ENGINE})


PARAMETERS, GRADIENTS, OPTIMIZER = trained_parts(POLICY)
SCORERS = tuple(map(frozen_part, FROZEN))
REFERENCE = SCORERS[0]
PARTS_OF = parts_of(WORKERS)
TRAINING: Parts = frozenset(part for model in WORKERS for part in trained_parts(model)[1:])
"""The parts that trained models need only in a training step."""

ALL_AT_ONCE: frozenset[str] = frozenset({"rollout"})
"""Services whose parts leave the devices only together: an engine is either asleep or awake. No part is taken from such
a service while it uses another part."""


def forbidden_pairs(models: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of parts of different services that must not be on the devices at the same time.

    `models` are the names of the trained models. Pairs are omitted on purpose where both parts are needed or fit: the
    engine copies its weights while the policy's parameters are on the device, where frozen models and the parameters of
    other trained models may stay for forward passes.
    """
    trained = {model: trained_parts(model) for model in models}
    pairs = [(KV_CACHE, part) for part in (*SCORERS, *(parts[0] for parts in trained.values()))]
    pairs += [(WEIGHTS, parts[0]) for model, parts in trained.items() if model != POLICY]
    pairs += [(part, own) for part in (WEIGHTS, KV_CACHE, *SCORERS) for parts in trained.values() for own in parts[1:]]
    parameters = {parts[0] for parts in trained.values()}
    beside = [pair for one, other in combinations(trained.values(), 2) for pair in product(one, other)]
    return (*pairs, *(pair for pair in beside if not parameters.issuperset(pair)))


def barred(pairs: Iterable[tuple[str, str]]) -> Mapping[str, Parts]:
    """Return, for each part, the parts that `pairs` forbid beside it."""
    barred: dict[str, Parts] = {}
    for one, other in pairs:
        barred[one] = barred.get(one, NOTHING) | {other}
        barred[other] = barred.get(other, NOTHING) | {one}
    return MappingProxyType(barred)


FORBIDDEN = forbidden_pairs(WORKERS)
_BARRED = barred(FORBIDDEN)


class DevicePhase(StrEnum):
    """The uses of the devices, in the order of a step."""

    EMPTY = "empty"
    TRAIN = "train"
    SYNC = "sync"
    GENERATE = "generate"
    SCORE = "score"


def phase_of(resident: Parts) -> DevicePhase:
    """Return the phase that follows from the parts on the devices."""
    if KV_CACHE in resident:
        return DevicePhase.GENERATE
    if WEIGHTS in resident:
        return DevicePhase.SYNC
    if resident & TRAINING:
        return DevicePhase.TRAIN
    if not resident.isdisjoint(SCORERS):
        return DevicePhase.SCORE
    return DevicePhase.TRAIN if resident else DevicePhase.EMPTY


def barred_by(parts: Iterable[str]) -> Parts:
    """Return all parts that are forbidden together with any of `parts`."""
    return frozenset().union(*(_BARRED[part] for part in parts))


class ForbiddenPair(ValueError):
    """The two parts of a forbidden pair must not be on the devices at the same time. The message is one line and names
    the parts and their holders."""


class DeviceLedger:
    """The parts that each process holds on the devices or has been granted."""

    def __init__(self) -> None:
        self._held: dict[Holder, Parts] = {}

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._held)

    @property
    def resident(self) -> Parts:
        """All parts that are held by at least one process."""
        return frozenset().union(*self._held.values())

    def of(self, holder: Holder) -> Parts:
        return self._held.get(holder, NOTHING)

    def in_the_way(self, holder: Holder, parts: Parts) -> dict[Holder, Parts]:
        """Return the parts that other processes must release before `holder` may use `parts`."""
        barred = barred_by(parts)
        return {
            other: parts_there & barred
            for other, parts_there in self._held.items()
            if other != holder and not barred.isdisjoint(parts_there)
        }

    def put(self, holder: Holder, parts: Parts) -> None:
        """Record that `holder` holds exactly `parts`. If a pair is forbidden, change nothing and raise
        ForbiddenPair."""
        for (service, instance), parts_there in self.in_the_way(holder, parts).items():
            there = min(parts_there)
            new = min(parts & barred_by([there]))
            raise ForbiddenPair(
                f"{new} of {holder[0]}/{holder[1]} cannot be on the devices at the same time as {there} of "
                f"{service}/{instance}"
            )
        if parts:
            self._held[holder] = parts
        else:
            self._held.pop(holder, None)


class Holding:
    """A process's own view: the parts it holds, uses and waits for. Each change requires a report with a new `number`.

    It does not move memory itself: the caller loads granted parts, moves the parts that `obey` returns off the device,
    and then calls `left`.
    """

    def __init__(self) -> None:
        self.number = 1
        self.holds = NOTHING
        self.using = NOTHING
        self.wants = NOTHING

    def want(self, parts: Parts) -> bool:
        """Ask for all `parts` together. Return whether this process is already using them; until then, it does not use
        any parts."""
        if parts <= self.using:
            return True
        if parts != self.wants:
            self.using, self.wants = NOTHING, parts
            self.number += 1
        return False

    def done(self) -> None:
        """Stop using parts and waiting for them. Held parts stay on the device until another process needs the
        space."""
        if self.using or self.wants:
            self.using = self.wants = NOTHING
            self.number += 1

    def obey(self, number: int, allowed: Parts, *, granted: bool) -> Parts:
        """Apply the answer to report `number`, and return the parts that must leave the device. Answers to older
        reports are ignored."""
        if number != self.number:
            return NOTHING
        leaving = self.holds - allowed
        if granted:
            self.holds |= self.wants
            self.using, self.wants = self.wants, NOTHING
        self.number += 1
        return leaving

    def left(self, parts: Parts) -> None:
        """Record that `parts` are off the device."""
        self.holds -= parts
        self.number += 1
