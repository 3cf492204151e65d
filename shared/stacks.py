"""Stacks of a hung process: a signal makes it write them to a file, even while code holds the interpreter lock."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGRTMIN + 3


def write_stacks_on_signal(descriptor: int, *, all_threads: bool) -> None:
    """Make this process write its stacks to `descriptor` on STACK_SIGNAL."""
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=all_threads, chain=False)


async def written(descriptor: int, begin: int, *, limit_s: float, poll_s: float, limit_bytes: int) -> str:
    """Return the text appended to a file after offset `begin`, once the file no longer grows.

    Return an empty string if nothing was written within `limit_s` seconds; a stopped process writes nothing.
    """
    size = begin
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while size == begin or os.fstat(descriptor).st_size != size:
                size = os.fstat(descriptor).st_size
                await asyncio.sleep(poll_s)  # the kernel sends no notification of writes to a file in memory
    return os.pread(descriptor, limit_bytes, begin).decode(errors="replace")
