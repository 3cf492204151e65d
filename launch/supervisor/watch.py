"""Finds processes that are alive but no longer answer messages. It only reports them; the state machine decides.

The mailbox thread of a service never computes, so silence means a stopped or stuck process. A stuck *worker* thread is
not detected here; instead, the scheduler ends its lease. Only READY processes are asked, because starting and stopping
have their own deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.processes.plan import Key
from launch.supervisor.sockets import SupervisorSockets
from proto.messages import Ping, Pong
from shared.rpc.errors import RpcError
from shared.rundir import RunDir

PING_EVERY_S = 2.0
SILENCE_S = 20.0
"""Seconds without an answer after which a process counts as hung; see also `SLOWNESS`."""
SLOWNESS = 5.0
"""A process counts as hung only after this multiple of the longest time that any READY process of its service has taken
to answer in this run.
"""
TICK_S = 0.5
CALL_S = 3600.0


@dataclass
class _Question:
    pid: int
    task: asyncio.Task[None]
    asked_at: float
    reported: bool = False


class MailboxWatch:
    """Pings the mailbox of each given process. For the loop thread only.

    Time during which this process itself was not running (it was stopped, or the machine is overloaded) does not count:
    the other processes may not have been running either, and their answers may be waiting to be read.
    """

    def __init__(
        self,
        run: RunDir,
        sockets: SupervisorSockets,
        *,
        ready: Callable[[], Iterator[tuple[Key, int]]],
        on_silent: Callable[[Key, int, float], None],
        on_unreachable: Callable[[], None],
    ) -> None:
        """`ready` yields the (key, pid) of each process to ask. `on_silent` is called with the (key, pid, seconds) of
        each process that counts as hung. `on_unreachable` is called if the folder of the sockets is gone, so that no
        process can connect to another one."""
        self._run = run
        self._sockets = sockets
        self._ready = ready
        self._on_silent = on_silent
        self._on_unreachable = on_unreachable
        self._questions: dict[Key, _Question] = {}
        self._longest_gap_s: dict[str, float] = {}
        """The longest time that an answer has taken, by service."""
        self._seen_at = time.monotonic()
        self._now = 0.0
        """Seconds that this process has run since the watch was created; time when it was stopped hardly counts."""

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            now = self._time()
            if not self._run.sockets.is_dir():
                self._on_unreachable()
                return
            ready = dict(self._ready())
            for key in [key for key, question in self._questions.items() if ready.get(key) != question.pid]:
                self._questions.pop(key).task.cancel()  # that process has ended
            for key, pid in ready.items():
                question = self._questions.get(key)
                if question is None or (question.task.done() and now >= question.asked_at + PING_EVERY_S):
                    self._questions[key] = _Question(pid, asyncio.create_task(self._ask(key, now)), now)
                elif (
                    not question.task.done() and not question.reported and now - question.asked_at > self._limit_s(key)
                ):
                    question.reported = True
                    self._on_silent(key, pid, round(now - question.asked_at))
            await asyncio.sleep(min(TICK_S, PING_EVERY_S))

    async def close(self) -> None:
        tasks = [question.task for question in self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _limit_s(self, key: Key) -> float:
        return max(SILENCE_S, SLOWNESS * self._longest_gap_s.get(key[0], 0.0))

    def _time(self) -> float:
        seen_at = time.monotonic()
        self._now += min(seen_at - self._seen_at, 2 * TICK_S)
        self._seen_at = seen_at
        return self._now

    async def _ask(self, key: Key, asked_at: float) -> None:
        with contextlib.suppress(RpcError):  # it answered with an error, or not in time
            await self._sockets.local(key).call(Ping(), Pong, deadline_s=CALL_S)
        gap_s = self._time() - asked_at
        self._longest_gap_s[key[0]] = max(gap_s, self._longest_gap_s.get(key[0], 0.0))
