"""Workflow processes, and the assignment of samples to them.

A sample that hangs, crashes or exhausts memory ends its process. A sample is lost by the end of its process only if it
was alone in it, or is known to be the cause; otherwise it is made again.
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
"""Number of broken processes after which a sample is made alone although it was not a suspect."""


class WorkflowPool:
    """A pool of processes on the service's loop. Call `start` before the first sample and `close` at the end."""

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
        self._process_ready = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._alone = asyncio.Semaphore(processes)
        self.lost = 0
        """Number of processes that ended while they had samples."""

    async def start(self) -> None:
        """Start every process. Raises RpcError(bad_request), in one line, if the workflow cannot be loaded."""
        # All processes are started before the first sample, because the samples of a lease are assigned at once.
        starting = [asyncio.create_task(self._start_one()) for _ in range(self._processes)]
        try:
            self._keepers = [
                asyncio.create_task(self._replace_when_ended(each)) for each in await asyncio.gather(*starting)
            ]
        finally:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    async def watch(self) -> None:
        """Wait until a process cannot be replaced, and raise its RpcError."""
        await asyncio.gather(*self._keepers)

    async def close(self) -> None:
        """End every process."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in list(self._all)))

    async def make(self, job: Job) -> Attempt:
        """Return the sample's attempt with its trajectory, or why it has none. The result is not Broken."""
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
        """Make the sample in a process of its own. If that breaks, the sample is the cause."""
        async with self._alone:
            process = await self._start_again()
            try:
                return await process.make(job)
            finally:
                await process.end()

    async def _least_loaded(self) -> WorkflowProcess:
        while not (ready := [process for process in self._ready if not process.leaving.is_set()]):
            self._process_ready.clear()
            await self._process_ready.wait()
        return min(ready, key=lambda process: process.load)

    # ---- the processes

    async def _replace_when_ended(self, process: WorkflowProcess) -> None:
        """Replace `process` whenever it ends."""
        idle_deaths = 0
        while True:
            self._ready.add(process)
            self._process_ready.set()
            await process.leaving.wait()
            self._ready.discard(process)
            idle_deaths = 0 if process.served else idle_deaths + 1
            if idle_deaths == START_ATTEMPTS:
                raise refused(WHAT, self._setup.function, "its process exits before it gets a sample")
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
