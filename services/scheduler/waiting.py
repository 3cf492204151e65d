"""The deferred calls of a scheduler: requests that cannot be answered yet. The module is pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from proto.messages import ErrorCode, LeaseRequest, NextBatch, WaitEvals
from services.scheduler.events import Asked, Fail
from services.scheduler.leases import Holder
from shared.rpc.errors import RpcError

MARGIN_S = 0.5
"""A deferred call is answered at the latest this many seconds before its deadline. If a quarter of the time that
remains when the call is deferred is shorter, that quarter is used instead."""
ANSWERED_AT_ONCE = 256
"""Maximum number of deferred lease requests of a stage that one event answers. This bounds how long other requests are
delayed. The next event, at the latest a tick, answers the next ones."""


def answer_by(asked: Asked, now: float) -> float:
    """Return the latest time at which a call that is deferred `now` is answered."""
    left = max(asked.deadline - now, 0.0)
    return asked.deadline - min(MARGIN_S, left / 4)


@dataclass(eq=False)
class Waiting:
    """A deferred call, and a function that answers the call if that is possible now."""

    asked: Asked
    attempt: Callable[[], bool]
    answer_by: float
    open: bool = True

    def fail(self, code: str, text: str) -> Fail:
        self.open = False
        return Fail(self.asked.ref, code, text)


class DeferredCalls:
    """The deferred lease requests by stage, and the deferred requests of the driver and the recorder (polls)."""

    def __init__(self, stages: int) -> None:
        self._leasing: list[deque[Waiting]] = [deque() for _ in range(stages)]
        """Lease requests by stage. They are answered in order of arrival."""
        self._leasing_of: dict[Holder, list[Waiting]] = {}
        """The requests in `_leasing` by process, including some that have been answered."""
        self._polls: list[Waiting] = []
        self._awaited: dict[tuple[str, int], float] = {}
        """Times at which the driver first made the requests that it is waiting for, by (request, step)."""

    @property
    def leases(self) -> int:
        """Number of lease requests that wait, including some that have been answered."""
        return sum(map(len, self._leasing))

    def lease(self, asked: Asked, holder: Holder, stage: int, attempt: Callable[[], bool], now: float) -> None:
        """Answer a lease request now or, if that is not possible or earlier ones wait, later."""
        if self._leasing[stage] or not attempt():
            waiting = Waiting(asked, attempt, answer_by(asked, now))
            self._leasing[stage].append(waiting)
            self._leasing_of[holder] = [*(one for one in self._leasing_of.get(holder, ()) if one.open), waiting]

    def poll(self, asked: Asked, attempt: Callable[[], bool], now: float) -> None:
        """Answer a request from the driver or the recorder now or, if that is not possible yet, later."""
        request, answered = asked.request, attempt()
        if not answered:
            self._polls.append(Waiting(asked, attempt, answer_by(asked, now)))
        if isinstance(request, NextBatch | WaitEvals):
            if answered:
                self._awaited.clear()
            else:
                self._awaited.setdefault((type(request).__name__, request.step), now)

    def awaited(self, now: float) -> dict[tuple[str, int], float]:
        """Return the seconds since the driver first made each deferred request, by (request, step)."""
        requests = [waiting.asked.request for waiting in self._polls if waiting.open]
        keys = [(type(one).__name__, one.step) for one in requests if isinstance(one, NextBatch | WaitEvals)]
        return {key: now - self._awaited.get(key, now) for key in keys}

    def retry(self) -> list[Fail]:
        """Answer the calls that can be answered, and return the failures of those that cannot be answered at all."""
        failures: list[Fail] = []
        for queue in self._leasing:
            for _ in range(min(len(queue), ANSWERED_AT_ONCE)):
                if not self._retry(queue[0], failures):
                    break
                queue.popleft()
        if self._polls:
            self._polls = [waiting for waiting in self._polls if not self._retry(waiting, failures)]
        return failures

    def _retry(self, waiting: Waiting, failures: list[Fail]) -> bool:
        """Try to answer a deferred call. Return whether the call has been answered, now or earlier."""
        if waiting.open:
            try:
                waiting.open = not waiting.attempt()
                if not waiting.open and isinstance(waiting.asked.request, NextBatch | WaitEvals):
                    self._awaited.clear()
            except RpcError as error:
                failures.append(waiting.fail(error.code, str(error)))
        return not waiting.open

    def expire(self, now: float) -> list[Fail]:
        """Fail the calls whose deadline is near."""
        late = [one for one in chain(*self._leasing, self._polls) if one.open and one.answer_by <= now]
        return [
            one.fail(ErrorCode.NOT_READY, f"scheduler: nothing yet for {type(one.asked.request).__name__}")
            for one in late
        ]

    def fail(self, holder: Holder, why: str, *, but: int = 0) -> list[Fail]:
        """Fail the lease requests of a process, except those of its life `but`."""
        return [
            one.fail(ErrorCode.LOST, why)
            for one in self._leasing_of.get(holder, ())
            if one.open and isinstance(one.asked.request, LeaseRequest) and one.asked.request.incarnation != but
        ]
