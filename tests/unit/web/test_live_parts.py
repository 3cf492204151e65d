"""The live stream sends only the newest version of a part, and a browser that does not read does not delay others."""

from __future__ import annotations

import asyncio
from typing import Any

from services.web import live_parts as module
from services.web.live_parts import LiveParts


class Browser:
    """An ASGI client that takes messages only while `reads` is set."""

    def __init__(self, parts: LiveParts) -> None:
        self.bodies: list[bytes] = []
        self.got = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(parts({}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
            self.got.set()

    async def next(self) -> bytes:
        async with asyncio.timeout(10):
            await self.got.wait()
        self.got.clear()
        return self.bodies[-1]

    def leave(self) -> None:
        self._gone.set()


def test_a_browser_gets_all_parts_first_and_then_only_changed_parts() -> None:
    async def scenario() -> None:
        parts = LiveParts()
        parts.put("head", {"step": 1})
        parts.put("services", [])
        browser = Browser(parts)
        assert await browser.next() == b'event: head\ndata: {"step":1}\n\nevent: services\ndata: []\n\n'
        parts.put("services", [])
        parts.put("head", {"step": 2})
        assert await browser.next() == b'event: head\ndata: {"step":2}\n\n'
        browser.leave()
        await browser.task
        assert parts.watchers == 0

    asyncio.run(scenario())


def test_a_browser_that_does_not_read_misses_versions_and_does_not_delay_others() -> None:
    async def scenario() -> None:
        parts = LiveParts()
        parts.put("head", 0)
        slow, quick = Browser(parts), Browser(parts)
        await slow.next()
        await quick.next()
        slow.reads.clear()
        for version in range(1, 100):
            parts.put("head", version)
            assert await quick.next() == b"event: head\ndata: %d\n\n" % version
        slow.reads.set()
        while b"data: 99\n" not in await slow.next():
            pass
        assert len(slow.bodies) <= 3
        for each in (slow, quick):
            each.leave()
            await each.task

    asyncio.run(scenario())


def test_a_browser_that_reads_nothing_is_disconnected(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.05)

    async def scenario() -> None:
        parts = LiveParts()
        parts.put("head", 0)
        browser = Browser(parts)
        await browser.next()
        browser.reads.clear()
        parts.put("head", 1)
        async with asyncio.timeout(10):
            await browser.task
        assert parts.watchers == 0

    asyncio.run(scenario())
