"""Implements the trainer's side of weight transfers as a pure state machine: it decides which engine gets a version
over which communicator.

A failing engine does not affect the transfers of others. An engine has one communicator, which belongs to one life
(incarnation) of that engine, carries one transfer at a time, and is closed at the first failure or missed deadline.
There is deliberately no way to repair a communicator, because half a transfer may remain in it. The engine asks again
and gets a new communicator. It has no version until it has verified one, so the scheduler gives it nothing to sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proto.messages import AskTransfer, EndTransfer

MOST_ENGINES = 1024
"""Maximum number of engines. Each has a communicator and a thread."""
MOST_REPLACED = 64
"""Maximum number of replaced lives of an engine that are remembered. The oldest are forgotten first."""


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


class TransferRefused(Exception):
    """A life of an engine may not take weights, for example because a later life has replaced it. The message is one
    line."""


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

    def next_deadline(self) -> float | None:
        """Return the time at which `expired` is due next, or None if no transfer is under way."""
        return min((link.deadline for link in self._links.values() if link.deadline is not None), default=None)

    def ask(self, request: AskTransfer, now: float) -> tuple[list[AbortTransfer], GrantTransfer]:
        """Grant a transfer to the life of an engine that asks, after these aborts. Raises TransferRefused."""
        engine, incarnation = request.instance, request.incarnation
        life = self._lives.get(engine)
        if life is None and len(self._lives) >= MOST_ENGINES:
            raise TransferRefused(f"engine {engine}: {MOST_ENGINES} engines take weights, which is the limit")
        replaced = self._replaced.setdefault(engine, {})
        if incarnation in replaced:
            raise TransferRefused(f"life {incarnation:x} of engine {engine} was replaced; it must exit")
        if life is not None and life != incarnation:
            replaced[life] = None
            if len(replaced) > MOST_REPLACED:
                del replaced[next(iter(replaced))]
        self._lives[engine] = incarnation
        aborts: list[AbortTransfer] = []
        link = self._links.get(engine)
        usable = (
            link is not None
            and (link.incarnation, link.communicator) == (incarnation, request.communicator)
            and (link.deadline is None or link.expects)  # otherwise the engine has given up the transfer under way
        )
        if link is None or not usable:
            if link is not None:
                aborts.append(self._abort(engine, "the engine starts over"))
            link = self._links[engine] = _EngineLink(incarnation, self.new_communicator(), 0, None)
        link.number += 1
        link.deadline, link.expects = now + self.deadline_s, False
        return aborts, GrantTransfer(engine, link.communicator, link.number, new=not usable)

    def end(self, request: EndTransfer, now: float, *, more: bool) -> list[AbortTransfer]:
        """Record how a transfer ended at its engine. `more` is whether the version has more parts, for which the engine
        must ask."""
        link = self._links.get(request.instance)
        if (
            link is None
            or (link.incarnation, link.communicator) != (request.incarnation, request.communicator)
            or link.number != request.number
        ):
            return []
        if request.failure:
            return [self._abort(request.instance, request.failure)]
        link.deadline, link.expects = (now + self.deadline_s if more else None), more
        return []

    def broke(self, communicator: int, why: str) -> list[AbortTransfer]:
        """Record that the trainer could not open `communicator` or send over it."""
        broken = [engine for engine, link in self._links.items() if link.communicator == communicator]
        return [self._abort(engine, why) for engine in broken]

    def expired(self, now: float) -> list[AbortTransfer]:
        """Abort the transfers whose deadline has passed."""
        late = [engine for engine, link in self._links.items() if link.deadline is not None and now >= link.deadline]
        return [self._abort(engine, f"not finished within {self.deadline_s:g} s") for engine in late]

    def _abort(self, engine: int, why: str) -> AbortTransfer:
        link = self._links.pop(engine)
        return AbortTransfer(engine, link.communicator, why)
