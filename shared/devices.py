"""What processes that share devices keep there, and what must never lie there together. Pure: it moves nothing, asks
nobody and looks at no clock.

The order of a step is not written down anywhere, it follows from `FORBIDDEN`: the optimizer and the gradients must be
off before the engine wakes with weights, the parameters and the reference before its key/value memory does, and all of
the engine before the gradients come back. On CUDA "device" is the GPUs' memory; where there is none it is the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

Holder = tuple[str, int]
"""(service, instance) of a process."""
Parts = frozenset[str]

PARAMETERS = "policy.parameters"
GRADIENTS = "policy.gradients"
OPTIMIZER = "policy.optimizer"
REFERENCE = "reference.parameters"
WEIGHTS = "engine.weights"
KV_CACHE = "engine.kv_cache"
NOTHING: Parts = frozenset()
ENGINE: Parts = frozenset({WEIGHTS, KV_CACHE})

PARTS_OF: Mapping[str, Parts] = MappingProxyType(
    {
        "policy-trainer-worker": frozenset({PARAMETERS, GRADIENTS, OPTIMIZER}),
        "reference": frozenset({REFERENCE}),
        "rollout": ENGINE,
    }
)
"""By the service whose processes hold them."""

ALL_AT_ONCE: frozenset[str] = frozenset({"rollout"})
"""Services whose parts leave together or not at all: an engine sleeps or is awake. So none of them is taken from it
while it works with another."""

FORBIDDEN: tuple[tuple[str, str], ...] = (
    (WEIGHTS, GRADIENTS),
    (WEIGHTS, OPTIMIZER),
    (KV_CACHE, PARAMETERS),
    (KV_CACHE, GRADIENTS),
    (KV_CACHE, OPTIMIZER),
    (KV_CACHE, REFERENCE),
    (REFERENCE, GRADIENTS),
    (REFERENCE, OPTIMIZER),
)
"""Pairs of parts of different services. What is left out is allowed on purpose: the engine takes its weights over while
the parameters lie there, and the reference may stay through that."""

_BARRED: Mapping[str, Parts] = MappingProxyType(
    {
        part: frozenset({b for a, b in FORBIDDEN if a == part} | {a for a, b in FORBIDDEN if b == part})
        for part in frozenset().union(*PARTS_OF.values())
    }
)


class Phase:
    """What the devices are used for, in the order of a step."""

    EMPTY = "empty"
    TRAIN = "train"
    SYNC = "sync"
    GENERATE = "generate"
    SCORE = "score"


def phase_of(resident: Parts) -> str:
    """The phase that the parts on the devices amount to."""
    if KV_CACHE in resident:
        return Phase.GENERATE
    if WEIGHTS in resident:
        return Phase.SYNC
    if resident & PARTS_OF["policy-trainer-worker"] - {PARAMETERS}:
        return Phase.TRAIN
    if REFERENCE in resident:
        return Phase.SCORE
    return Phase.TRAIN if resident else Phase.EMPTY


def barred_by(parts: Iterable[str]) -> Parts:
    """Everything that must not lie beside any of `parts`."""
    return frozenset().union(*(_BARRED[part] for part in parts))


class ForbiddenPair(ValueError):
    """Two parts that must never lie on the devices together. One line that names both, and who holds the first."""


class Ledger:
    """What each process has on the devices, or was promised room for."""

    def __init__(self) -> None:
        self._held: dict[Holder, Parts] = {}

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._held)

    @property
    def resident(self) -> Parts:
        """The parts that anybody holds."""
        return frozenset().union(*self._held.values())

    def of(self, holder: Holder) -> Parts:
        return self._held.get(holder, NOTHING)

    def in_the_way(self, holder: Holder, parts: Parts) -> dict[Holder, Parts]:
        """Who must give up what before `parts` may be put there for `holder`."""
        barred = barred_by(parts)
        return {
            other: held & barred
            for other, held in self._held.items()
            if other != holder and not barred.isdisjoint(held)
        }

    def put(self, holder: Holder, parts: Parts) -> None:
        """`holder` has exactly `parts` from now on. Raises ForbiddenPair, and changes nothing, when that may not be."""
        for (service, instance), held in self.in_the_way(holder, parts).items():
            there = min(held)
            new = min(parts & barred_by([there]))
            raise ForbiddenPair(
                f"{new} of {holder[0]}/{holder[1]} may not lie on the devices beside {there} of {service}/{instance}"
            )
        if parts:
            self._held[holder] = parts
        else:
            self._held.pop(holder, None)


class Holding:
    """A process's own side: what it holds, works with and waits for. Every change is a new report, `number`.

    It moves nothing: whoever is granted parts loads them, and what `obey` returns is to be taken off, then `left`.
    """

    def __init__(self) -> None:
        self.number = 1
        self.holds = NOTHING
        self.using = NOTHING
        self.wants = NOTHING

    def want(self, parts: Parts) -> bool:
        """Ask for `parts`, all at once; until they are granted nothing is in use. True: they are in use already."""
        if parts <= self.using:
            return True
        if parts != self.wants:
            self.using, self.wants = NOTHING, parts
            self.number += 1
        return False

    def done(self) -> None:
        """Nothing is worked with or waited for any more; what is held stays until somebody else wants the room."""
        if self.using or self.wants:
            self.using = self.wants = NOTHING
            self.number += 1

    def obey(self, number: int, allowed: Parts, *, granted: bool) -> Parts:
        """Take over the answer to report `number`; returns what has to leave. One to an older report says nothing."""
        if number != self.number:
            return NOTHING
        leaving = self.holds - allowed
        if granted:
            self.holds |= self.wants
            self.using, self.wants = self.wants, NOTHING
        self.number += 1
        return leaving

    def left(self, parts: Parts) -> None:
        """`parts` are off the device."""
        self.holds -= parts
        self.number += 1
