"""Keeps clients connected to the current endpoints of their peers when a run spans several hosts.

Look-ups never block a request: a client without a connection keeps its requests until it is connected or their deadline
passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shared.rpc.client import Client
from shared.rpc.errors import RpcError

RETRY_S = 0.5
"""Seconds between two look-ups of a peer that is not registered yet."""
PAUSE_S = 1.0
"""Seconds between two look-ups of a connected peer that is silent: it may be busy, or it may have moved."""
Find = Callable[[str, int], Awaitable[str]]
"""Function that returns the endpoint of (service, instance) as seen from this host, or raises RpcError if it is
unknown."""


class Directory:
    """Look-ups for the clients of one process. It belongs to one event loop."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._searches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._log = structlog.get_logger("directory")

    def follow(self, service: str, instance: int, client: Client) -> None:
        """Connect `client` to that service as soon as its endpoint is known, and again whenever the service moves."""
        key = (service, instance)

        def look() -> None:
            search = self._searches.get(key)
            if search is None or search.done():
                self._searches[key] = asyncio.create_task(self._search(key, client))

        client.on_silent = look
        look()

    async def close(self) -> None:
        """Cancel all look-ups."""
        for search in self._searches.values():
            search.cancel()
        await asyncio.gather(*self._searches.values(), return_exceptions=True)

    async def _search(self, key: tuple[str, int], client: Client) -> None:
        while True:
            try:
                client.connect(await self._find(*key))
            except RpcError as error:
                self._log.info("peer not found", peer=client.peer, error=str(error))
            if client.endpoint:
                await asyncio.sleep(PAUSE_S)
                return
            await asyncio.sleep(RETRY_S)
