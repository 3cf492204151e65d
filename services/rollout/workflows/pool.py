"""Workflow processes, and which sample is made in which of them. A sample that hangs, crashes or eats memory takes its
process with it; must never be lost for it unless it did so alone, or was seen doing it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.rollout.user_code import refused
from services.rollout.user_process import START_ATTEMPTS
from services.rollout.workflows.frames import Failed, Setup
from services.rollout.workflows.host import Attempt, Broken, Endpoint, Job, WorkflowProcess
from services.rollout.workflows.load import WHAT
from shared.rpc.errors import RpcError

MOST_BROKEN = 3
"""Processes that may break over a sample that was no suspect, before it is made alone."""


class WorkflowPool:
    """Belongs to the service's loop. `start` before the first sample, `close` at the end."""

    def __init__(
        self,
        function: str,
        params: dict[str, Any],
        *,
        timeout_s: float,
        memory_bytes: int,
        processes: int,
        endpoint: Endpoint,
    ) -> None:
        self._setup = Setup(function, params, timeout_s, memory_bytes)
        self._processes = processes
        self._endpoint = endpoint
        self._ready: set[WorkflowProcess] = set()
        self._all: set[WorkflowProcess] = set()
        self._came = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._alone = asyncio.Semaphore(processes)
        self.lost = 0
        """Processes that ended over a sample."""

    async def start(self) -> None:
        """Load the workflow once. Raises RpcError(bad_request), one line, for one that cannot be had."""
        # All of them before the first sample: those of a lease are handed out at once.
        starting = [asyncio.create_task(self._start_one()) for _ in range(self._processes)]
        try:
            self._keepers = [asyncio.create_task(self._keep(each)) for each in await asyncio.gather(*starting)]
        finally:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    async def watch(self) -> None:
        """Wait for the end of a process that cannot be replaced: raises its RpcError."""
        await asyncio.gather(*self._keepers)

    async def close(self) -> None:
        """End every process."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in list(self._all)))

    async def make(self, job: Job) -> Attempt:
        """The sample's trajectory, or why it has none; never Broken."""
        broken = 0
        alone = False
        while True:
            attempt = await (self._make_alone(job) if alone else (await self._least_loaded()).make(job))
            ended = attempt.ended
            if not isinstance(ended, Broken):
                return attempt
            if alone or ended.certain:
                return Attempt(Failed(0, ended.why), attempt.calls)
            broken += 1
            alone = ended.suspect or broken == MOST_BROKEN

    async def _make_alone(self, job: Job) -> Attempt:
        """In a process of its own: if that breaks, nobody else was there."""
        async with self._alone:
            process = await self._start_again()
            try:
                return await process.make(job)
            finally:
                await process.end()

    async def _least_loaded(self) -> WorkflowProcess:
        while not (ready := [process for process in self._ready if not process.leaving.is_set()]):
            self._came.clear()
            await self._came.wait()
        return min(ready, key=lambda process: process.load)

    # ---- the processes

    async def _keep(self, process: WorkflowProcess) -> None:
        """See that there is one, always."""
        idle_deaths = 0
        while True:
            self._ready.add(process)
            self._came.set()
            await process.leaving.wait()
            self._ready.discard(process)
            idle_deaths = 0 if process.served else idle_deaths + 1
            if idle_deaths == START_ATTEMPTS:
                raise refused(WHAT, self._setup.function, "its process ends before it has a sample to make")
            process = await self._start_again()

    async def _start_again(self) -> WorkflowProcess:
        for attempt in range(START_ATTEMPTS):
            try:
                return await self._start_one()
            except RpcError:
                if attempt == START_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _start_one(self) -> WorkflowProcess:
        process = await WorkflowProcess.start(self._setup, self._endpoint)
        self._all.add(process)

        def ended(_: asyncio.Task[None]) -> None:
            self._all.discard(process)
            self.lost += process.broken

        process.task.add_done_callback(ended)
        return process
