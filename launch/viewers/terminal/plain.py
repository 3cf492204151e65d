"""Prints a live run as lines of text, for pipes and simple terminals: the current picture, then the changes."""

from __future__ import annotations

import asyncio
import time

from launch.viewers.terminal import panes
from launch.viewers.terminal.feed import Feed
from launch.viewers.terminal.visible import visible
from proto.messages import TopicRow

WIDTH = 120
EVERY_S = 1.0
"""Seconds between two checks of the view. Several steps in between are printed as one line."""


async def print_picture(feed: Feed) -> None:
    """Print the picture once, then a line for each change, until the run ends."""
    follows = asyncio.create_task(feed.follow())
    arrives = asyncio.create_task(feed.connected.wait())
    try:
        await asyncio.wait({follows, arrives}, return_when=asyncio.FIRST_COMPLETED)
        await feed.read_all_files()
        _print_all(feed)
        teller = _Changes(feed)
        while not follows.done():
            await asyncio.wait({follows}, timeout=EVERY_S)
            feed.read_files()
            teller.tell()
        follows.result()
    finally:
        for task in (follows, arrives):
            task.cancel()
        await asyncio.gather(follows, arrives, return_exceptions=True)


def print_row(row: TopicRow) -> None:
    """Print a row of the stream."""
    values = "  ".join(
        f"{key}={value if isinstance(value, str) else format(value, '.6g')}" for key, value in row.values.items()
    )
    _print(f"{panes.clock(row.at)} {row.topic:<20} {row.service}/{row.instance}  {values}")


def _print_all(feed: Feed) -> None:
    view, now = feed.view, time.time()
    _print(_headline(feed))
    for line in (*panes.notices(view, WIDTH), *panes.pipeline(view, WIDTH)):
        _print(line.plain)
    for service in view.services(now):
        _print("  ".join(cell.plain for cell in panes.service_cells(service)).rstrip())


class _Changes:
    """Prints what has changed since the last check."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._step = feed.view.progress().step
        self._states = self._now_states()
        self._notices = {line.plain for line in panes.notices(feed.view, WIDTH)}

    def tell(self) -> None:
        view = self._feed.view
        for line in panes.notices(view, WIDTH):
            if line.plain not in self._notices:
                _print(line.plain)
                self._notices.add(line.plain)
        states = self._now_states()
        for name, state in states.items():
            if self._states.get(name) != state:
                _print(f"{panes.clock(time.time())} {name} {state}")
        self._states = states
        progress = view.progress()
        if progress.step != self._step:
            self._step = progress.step
            _print(f"{panes.clock(time.time())} {_headline(self._feed)}")

    def _now_states(self) -> dict[str, str]:
        return {
            service.name: f"{service.state} {service.cause}".rstrip()
            for service in self._feed.view.services(time.time())
        }


def _headline(feed: Feed) -> str:
    return panes.headline(feed.run.name, feed.view.progress(), width=WIDTH).plain.rstrip()


def _print(text: str) -> None:
    print(visible(text), flush=True)
