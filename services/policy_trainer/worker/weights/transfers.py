"""Implements the trainer's side of weight transfers as a pure state machine: it decides which engine gets a version
over which communicator.

A failing engine does not affect the transfers of others. An engine has one communicator, which belongs to one life
(incarnation) of that engine, carries one transfer at a time, and is closed at the first failure or missed deadline.
There is deliberately no way to repair a communicator, because half a transfer may remain in it. The engine asks again
and gets a new communicator. It has no version until it has verified one, so the scheduler gives it nothing to sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_ENGINES = 1024
"""Maximum number of engines. Each has a communicator and a thread."""
MOST_REPLACED = 64
"""Maximum number of replaced lives of an engine that are remembered. The oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class TransferAsked:
    """A life of an engine asks for a transfer. `communicator` is the one that the engine holds, or 0 for
    none."""

    engine: int
    incarnation: int
    communicator: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A life of an engine reports how transfer `number` ended there. `more` is whether the version has more parts, for
    which it must ask."""

    engine: int
    incarnation: int
    communicator: int
    number: int
    failure: str
    more: bool = False


@dataclass(frozen=True, slots=True)
class CommunicatorBroke:
    """The trainer could not open `communicator` or send over it."""

    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A deadline may have passed."""


@dataclass(frozen=True, slots=True)
class GrantTransfer:
    """Send transfer `number` over `communicator` of `engine`, after opening it if it is `new`."""

    engine: int
    communicator: int
    number: int
    new: bool


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Close `communicator`. A transfer under way is lost."""

    engine: int
    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class RefuseTransfer:
    """Refuse a life of an engine if a later life has replaced it."""

    why: str


Event = TransferAsked | TransferEnded | CommunicatorBroke | DeadlinePassed
Effect = GrantTransfer | AbortTransfer | RefuseTransfer


@dataclass
class _EngineLink:
    """The communicator of one engine. `deadline` is the deadline of the transfer under way, or of the request for the
    next part (`expects`), or None."""

    incarnation: int
    communicator: int
    number: int
    deadline: float | None
    expects: bool = False


@dataclass
class TransferState:
    """All transfers. `new_communicator` returns unique ids; `deadline_s` is the time limit for joining and the transfer
    together."""

    new_communicator: Callable[[], int]
    deadline_s: float
    _links: dict[int, _EngineLink] = field(default_factory=dict)
    _replaced: dict[int, dict[int, None]] = field(default_factory=dict)
    """Lives of each engine that have been replaced by later lives."""
    _lives: dict[int, int] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Return the effects of `event` in order."""
        match event:
            case TransferAsked():
                return self._ask(event, now)
            case TransferEnded():
                return self._end(event, now)
            case CommunicatorBroke():
                broken = [engine for engine, link in self._links.items() if link.communicator == event.communicator]
                return [self._abort(engine, event.why) for engine in broken]
            case DeadlinePassed():
                late = [
                    engine for engine, link in self._links.items() if link.deadline is not None and now >= link.deadline
                ]
                return [self._abort(engine, f"not finished within {self.deadline_s:g} s") for engine in late]

    def next_deadline(self) -> float | None:
        """Return the time at which `DeadlinePassed` is due next, or None if no transfer is under way."""
        return min((link.deadline for link in self._links.values() if link.deadline is not None), default=None)

    def _ask(self, event: TransferAsked, now: float) -> Sequence[Effect]:
        if event.engine not in self._lives and len(self._lives) >= MOST_ENGINES:
            return [RefuseTransfer(f"engine {event.engine}: {MOST_ENGINES} engines take weights, which is the limit")]
        replaced = self._replaced.setdefault(event.engine, {})
        if event.incarnation in replaced:
            return [RefuseTransfer(f"life {event.incarnation:x} of engine {event.engine} was replaced; it must exit")]
        known = self._lives.get(event.engine)
        if known is not None and known != event.incarnation:
            replaced[known] = None
            if len(replaced) > MOST_REPLACED:
                del replaced[next(iter(replaced))]
        self._lives[event.engine] = event.incarnation
        effects: list[Effect] = []
        link = self._links.get(event.engine)
        usable = (
            link is not None
            and link.incarnation == event.incarnation
            and link.communicator == event.communicator
            and (link.deadline is None or link.expects)  # otherwise the engine has given up the transfer under way
        )
        if link is None or not usable:
            if link is not None:
                effects.append(self._abort(event.engine, "the engine starts over"))
            link = self._links[event.engine] = _EngineLink(event.incarnation, self.new_communicator(), 0, None)
        link.number += 1
        link.deadline, link.expects = now + self.deadline_s, False
        return [*effects, GrantTransfer(event.engine, link.communicator, link.number, new=not usable)]

    def _end(self, event: TransferEnded, now: float) -> Sequence[Effect]:
        link = self._links.get(event.engine)
        if (
            link is None
            or (link.incarnation, link.communicator) != (event.incarnation, event.communicator)
            or link.number != event.number
        ):
            return []
        if event.failure:
            return [self._abort(event.engine, event.failure)]
        link.deadline, link.expects = (now + self.deadline_s if event.more else None), event.more
        return []

    def _abort(self, engine: int, why: str) -> AbortTransfer:
        link = self._links.pop(engine)
        return AbortTransfer(engine, link.communicator, why)
