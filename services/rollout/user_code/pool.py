"""A pool of processes for users' code, each of which is replaced when it ends, and the report of failing samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from proto.messages import ErrorCode, Trouble, TroubleKind, WaitRow
from services.rollout.rewards.score import Score
from services.rollout.user_code.frames import Ready, Setup
from services.rollout.user_code.host import Broken, Ended, UserHost, Work
from services.rollout.user_code.load import refused
from shared.rpc.errors import RpcError

START_ATTEMPTS = 3
MOST_BROKEN = 3
"""Number of broken processes after which a call is made alone even if it was never a suspect."""
W = TypeVar("W", bound=Work)
TEXT_CHARS = 900
MOST_LOGGED = 64
"""Maximum number of failures that are logged with a traceback before a lease succeeds again."""


class UserPool:
    """A pool on the service's loop. Call `start` before anything else, and `close` at the end."""

    def __init__(self, setup: Setup, processes: int) -> None:
        self._setup = setup
        self._processes = processes
        self._free: set[UserHost] = set()
        """The processes that accept calls and are not reserved."""
        self._all: set[UserHost] = set()
        self._process_free = asyncio.Event()
        self._alone = asyncio.Semaphore(processes)
        self.ready = Ready()
        """The processes' description of their functions."""
        self.keepers: list[asyncio.Task[None]] = []
        """A task for each process. It fails with RpcError if the process cannot be replaced."""
        self.restarts = 0
        """Number of processes that were replaced."""
        self.lost = 0
        """Number of processes that ended during calls."""

    async def start(self, at_once: int) -> None:
        """Start the processes and wait for `at_once` of them; the others follow.

        Raises a one-line RpcError(bad_request) if a function cannot be loaded.
        """
        starting = [asyncio.create_task(self._start_one()) for _ in range(at_once)]
        try:
            begun: list[UserHost | None] = list(await asyncio.gather(*starting))
        finally:
            for starter in starting:
                starter.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        begun += [None] * (self._processes - at_once)
        self.keepers = [asyncio.create_task(self._replace_when_ended(starter)) for starter in begun]

    async def watch(self) -> None:
        """Wait until a process cannot be replaced, and raise the resulting RpcError. Without processes, wait
        forever."""
        await asyncio.gather(*self.keepers, asyncio.Event().wait())

    async def close(self) -> None:
        """Stop every process."""
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in list(self._all)))

    async def waits(self) -> list[WaitRow]:
        """Return a row for each process that is working on calls."""
        rows = await asyncio.gather(*(process.waits() for process in list(self._all)))
        return [row for of_process in rows for row in of_process]

    async def make(self, new_work: Callable[[], W]) -> tuple[Ended, W]:
        """Make a call, and repeat it with new work if its process ends. Return how the call ended, and the last work.

        When its process breaks, the call fails only if it was alone in that process or is known to be the cause.
        """
        broken = 0
        alone = False
        while True:
            work = new_work()
            if alone:
                async with self.alone() as process:
                    ended = await process.make(work)
            else:
                ended = await (await self.least_loaded()).make(work)
            if not isinstance(ended, Broken):
                return ended, work
            if alone or ended.certain:
                return ended.failed, work
            broken += 1
            alone = ended.suspect or broken == MOST_BROKEN

    async def least_loaded(self) -> UserHost:
        """Wait until an unreserved process is accepting calls. If there are several, return the one with the fewest
        calls."""
        while not (free := [process for process in self._free if not process.leaving.is_set()]):
            self._process_free.clear()
            await self._process_free.wait()
        return min(free, key=lambda process: process.load)

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[UserHost]:
        """Yield a process for the caller's exclusive use."""
        process = await self.least_loaded()
        self._free.discard(process)
        try:
            yield process
        finally:
            self._add(process)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[UserHost]:
        """Yield a new process for one call. If that process breaks, the call is the cause."""
        async with self._alone:
            process = await self._start_again()
            try:
                yield process
            finally:
                await process.end()

    def _add(self, process: UserHost) -> None:
        if not process.leaving.is_set():
            self._free.add(process)
            self._process_free.set()

    async def _replace_when_ended(self, process: UserHost | None) -> None:
        """Replace `process` whenever it ends. None stands for a process that has yet to be started."""
        idle_deaths = 0
        while True:
            process = process or await self._start_again()
            self._add(process)
            await process.leaving.wait()
            self._free.discard(process)
            self.restarts += 1
            idle_deaths = 0 if process.served else idle_deaths + 1
            if idle_deaths == START_ATTEMPTS:
                paths = ", ".join(path for path, _ in self._setup.functions)
                text = str(refused(self._setup.purpose, paths, "the process exits before it receives a sample"))
                raise RpcError(ErrorCode.INTERNAL, text)  # memory may be short
            process = None

    async def _start_again(self) -> UserHost:
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await self._start_one()
            except RpcError:
                continue
        return await self._start_one()

    async def _start_one(self) -> UserHost:
        process = await UserHost.start(self._setup)
        self.ready = process.ready
        self._all.add(process)

        def ended(_: asyncio.Task[None]) -> None:
            self._all.discard(process)
            self.lost += process.broken

        process.task.add_done_callback(ended)
        return process


class Failing:
    """Counts samples from the first failure until a whole lease succeeds."""

    def __init__(self, kind: TroubleKind, log: str) -> None:
        """`log` is the name of the logger."""
        self._kind = kind
        self._log = structlog.get_logger(log)
        self._failed = 0
        self._samples = 0
        self._last = ""
        self._logged: set[tuple[str, str]] = set()

    def count(self, scores: Sequence[Score]) -> None:
        """Count samples that have ended."""
        for score in scores:
            if score.value is None:
                self._failed += 1
                self._last = score.failure
                self._write(score)
        if self._failed:
            self._samples += len(scores)

    def lease_ended(self, *, well: bool) -> None:
        """Record that all samples of a lease have ended. `well` means that none of them failed."""
        if well:
            self._failed = self._samples = 0
            self._logged.clear()

    def troubles(self) -> list[Trouble]:
        """Return the problems to report in the heartbeat."""
        if not self._failed:
            return []
        text = f"{self._kind} failing: {self._failed} of {self._samples}, {self._last}"
        return [Trouble(self._kind, text[:TEXT_CHARS])]

    def _write(self, score: Score) -> None:
        key = (score.kind, score.trace or score.failure)
        if key not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(key)
            self._log.warning("sample failed", kind=str(score.kind), why=score.failure, exception=score.trace)
