"""Finds processes that are alive but no longer answer their mailbox. It only reports them; the state machine decides.

The mailbox thread of a service never computes, so silence means a stopped or stuck process. A stuck *working* thread
is not detected here: it loses its lease in the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import zmq

from launch.supervisor.plan import Key
from proto.messages import Ping, Pong
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rundir import RunDir, service_name

PING_EVERY_S = 5.0
SILENCE_S = 60.0


class MailboxWatch:
    """Pings the mailbox of each given process. For the loop thread only."""

    def __init__(
        self,
        run: RunDir,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: int,
        *,
        ready: Callable[[], Iterator[tuple[Key, int]]],
        on_silent: Callable[[Key, int, float], None],
    ) -> None:
        """`ready` returns (key, pid) of the processes to ask. `on_silent` is called with (key, pid, seconds)."""
        self._run = run
        self._context = context
        self._incarnation = incarnation
        self._ready = ready
        self._on_silent = on_silent
        self._clients: dict[Key, Client] = {}
        self._asking: dict[Key, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            for key, pid in self._ready():
                if key not in self._asking or self._asking[key].done():
                    self._asking[key] = asyncio.create_task(self._ask(key, pid))
            await asyncio.sleep(PING_EVERY_S)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            client.close()

    async def _ask(self, key: Key, pid: int) -> None:
        if key not in self._clients:
            endpoint = self._run.endpoint(*key)
            self._clients[key] = Client(self._context, endpoint, service_name(*key), self._incarnation)
        try:
            await self._clients[key].call(Ping(), Pong, deadline_s=SILENCE_S)
        except DeadlineExceeded:
            self._on_silent(key, pid, SILENCE_S)
        except RpcError:
            return  # it answered
