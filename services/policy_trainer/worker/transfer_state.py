"""The trainer's side of weight transfers as a pure state machine: which engine gets a version over which communicator.

A failing engine does not affect the transfers of others. An engine has one communicator, which belongs to one life
(incarnation) of that engine, carries one transfer at a time, and is closed at the first failure or missed deadline.
There is deliberately no way to repair one, because it may hold half a transfer. The engine asks again and gets a new
one. Until a version is verified the engine holds none, so the scheduler gives it nothing to sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asked:
    """A life of an engine asks for a transfer. `communicator` is the one it holds, or 0 for none."""

    engine: int
    incarnation: int
    communicator: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A life of an engine reports how transfer `number` ended there."""

    engine: int
    incarnation: int
    communicator: int
    number: int
    failure: str


@dataclass(frozen=True, slots=True)
class Broke:
    """The trainer could not open `communicator` or send over it."""

    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Send transfer `number` over `communicator` of `engine`, after opening it if it is `new`."""

    engine: int
    communicator: int
    number: int
    new: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Close `communicator`. A transfer under way is lost."""

    engine: int
    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a life of an engine that was replaced by a later one."""

    why: str


Event = Asked | Ended | Broke | Passed
Effect = Grant | Abort | Refuse


@dataclass
class _Line:
    """The communicator of one engine. `deadline` is that of the transfer under way, or None if there is none."""

    incarnation: int
    communicator: int
    number: int
    deadline: float | None


@dataclass
class Transfers:
    """All transfers. `new_communicator` returns unique ids; `deadline_s` covers joining and transfer together."""

    new_communicator: Callable[[], int]
    deadline_s: float
    _lines: dict[int, _Line] = field(default_factory=dict)
    _replaced: dict[int, set[int]] = field(default_factory=dict)
    """Lives of each engine that were replaced by later ones."""
    _lives: dict[int, int] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """Return the effects of `event` in order."""
        match event:
            case Asked():
                return self._ask(event, now)
            case Ended():
                return self._end(event)
            case Broke():
                broken = [engine for engine, line in self._lines.items() if line.communicator == event.communicator]
                return [self._abort(engine, event.why) for engine in broken]
            case Passed():
                late = [
                    engine for engine, line in self._lines.items() if line.deadline is not None and now >= line.deadline
                ]
                return [self._abort(engine, f"no end within {self.deadline_s:g} s") for engine in late]

    def next_deadline(self) -> float | None:
        """Return the time at which `Passed` is due next, or None if no transfer is under way."""
        return min((line.deadline for line in self._lines.values() if line.deadline is not None), default=None)

    def _ask(self, event: Asked, now: float) -> Sequence[Effect]:
        replaced = self._replaced.setdefault(event.engine, set())
        if event.incarnation in replaced:
            return [Refuse(f"life {event.incarnation:x} of engine {event.engine} was replaced; it must end")]
        known = self._lives.get(event.engine)
        if known is not None and known != event.incarnation:
            replaced.add(known)
        self._lives[event.engine] = event.incarnation
        effects: list[Effect] = []
        line = self._lines.get(event.engine)
        usable = (
            line is not None
            and line.incarnation == event.incarnation
            and line.communicator == event.communicator
            and line.deadline is None  # otherwise the engine has given up the transfer under way
        )
        if line is None or not usable:
            if line is not None:
                effects.append(self._abort(event.engine, "the engine begins anew"))
            line = self._lines[event.engine] = _Line(event.incarnation, self.new_communicator(), 0, None)
        line.number += 1
        line.deadline = now + self.deadline_s
        return [*effects, Grant(event.engine, line.communicator, line.number, new=not usable)]

    def _end(self, event: Ended) -> Sequence[Effect]:
        line = self._lines.get(event.engine)
        if (
            line is None
            or (line.incarnation, line.communicator) != (event.incarnation, event.communicator)
            or line.number != event.number
        ):
            return []
        if event.failure:
            return [self._abort(event.engine, event.failure)]
        line.deadline = None
        return []

    def _abort(self, engine: int, why: str) -> Abort:
        line = self._lines.pop(engine)
        return Abort(engine, line.communicator, why)
