"""Sends the live parts of the page to any number of browsers as server-sent events.

Only the newest version of each part is kept. A slow browser therefore misses versions but neither delays other browsers
nor uses extra memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_S = 15.0
SEND_S = 30.0
"""Maximum time, in seconds, that a browser may take to receive an update. A browser that takes longer is disconnected,
and then reconnects."""
MAX_STREAMS = 32
"""Maximum number of browsers that follow the run at the same time."""
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


class LiveParts:
    """The newest version of each part."""

    def __init__(self) -> None:
        self.watchers = 0
        """Number of browsers that follow the run."""
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._version = 0
        self._changed = asyncio.Event()

    @property
    def filled(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._parts)

    def put(self, part: str, value: object) -> None:
        """Set a part. An unchanged value is not sent again."""
        data = msgspec.json.encode(value)
        before = self._parts.get(part)
        if before is None or before[1] != data:
            self._version += 1
            self._parts[part] = (self._version, data)
            self._changed.set()
            self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one browser, as an ASGI application, until the browser disconnects or is too slow."""
        self.watchers += 1
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.watchers -= 1
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        seen = 0
        while True:
            changed = self._changed
            body, seen = b"".join(self._events(seen)), self._version
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": body or b":\n\n", "more_body": True})
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await changed.wait()
            except TimeoutError:
                continue

    def _events(self, seen: int) -> Iterator[bytes]:
        for part, (version, data) in self._parts.items():
            if version > seen:
                yield b"event: %s\ndata: %s\n\n" % (part.encode(), data)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
