"""Who is sent which version over which communicator: the trainer's side of weight transfers. Pure. Must never let one
engine's trouble touch another's transfer, nor send over a communicator that may hold half of something.

An engine has one communicator. It belongs to one life (incarnation) of that engine, carries one transfer at a time, and
is over with the first that fails or is late. Missing on purpose: a way to mend one. The engine asks again and gets a
new one; until a version is proved it holds none, so the scheduler gives it nothing to sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asked:
    """An engine's life asks for a transfer; `communicator`: the one it holds, 0 for none."""

    engine: int
    incarnation: int
    communicator: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine's life says how transfer `number` ended there."""

    engine: int
    incarnation: int
    communicator: int
    number: int
    failure: str


@dataclass(frozen=True, slots=True)
class Broke:
    """This end could not open `communicator`, or not send over it."""

    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Send transfer `number` over `communicator` of `engine`, opening it first if it is `new`."""

    engine: int
    communicator: int
    number: int
    new: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Close `communicator`; whatever it carries is lost."""

    engine: int
    communicator: int
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The asking life was replaced by a later one: it gets nothing."""

    why: str


Event = Asked | Ended | Broke | Passed
Effect = Grant | Abort | Refuse


@dataclass
class _Line:
    """What leads to one engine. `deadline` of the transfer under way; None: none is."""

    incarnation: int
    communicator: int
    number: int
    deadline: float | None


@dataclass
class Transfers:
    """`new_communicator` names communicators, never twice; `deadline_s`: joining and transfer together."""

    new_communicator: Callable[[], int]
    deadline_s: float
    _lines: dict[int, _Line] = field(default_factory=dict)
    _replaced: dict[int, set[int]] = field(default_factory=dict)
    """Lives of each engine that were followed by another."""
    _lives: dict[int, int] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        """What is to be done, in order."""
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
        """When `Passed` has something to do; None: nothing is under way."""
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
            and line.deadline is None  # else the engine gave up what was under way
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
