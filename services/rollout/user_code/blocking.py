"""Judges whether users' code blocks the loop of its process, by what the kernel has counted for the loop's thread.

A loop that does not answer is blocked only while its own thread computes or sleeps in a call. A thread that is ready to
run but has no processor, that waits for a disk, or that is stopped, suffers from the load of the machine, and so does a
loop that is slow for this reason. `BlockedTime` and `explained` do no I/O.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path

from services.rollout.user_code.trace import Home, StackLine, stack_lines, users_line

_NS = 1e-9
ASLEEP = "S"
"""State of a thread that waits for an event in a call (proc(5)). A wait for a disk has the state D, a stop T or t."""
SOURCE_CHARS = 60
_ON_A_THREAD = "await ctx.call(function, ...) runs it on a thread"
_LOCK = "Python's lock, which a thread of a tool keeps; run that tool in a process"
_LOCK_WAITS = frozenset({("selectors.py", "select"), ("user_side.py", "call")})
"""Functions that cannot sleep while the loop has messages, except for Python's lock: the loop's own, and `ctx.call`,
whose new thread may keep the lock."""


@dataclass(frozen=True)
class ThreadTimes:
    """What the kernel has counted for a thread so far, in seconds, and the thread's state (proc(5))."""

    ran_s: float
    queued_s: float
    """Time on a run queue: the thread was ready to run, but had no processor."""
    state: str


def thread_times(pid: int) -> ThreadTimes | None:
    """Return the times of the main thread of process `pid`, or None if the process is gone or the kernel does not count
    them (CONFIG_SCHED_INFO)."""
    thread = Path(f"/proc/{pid}/task/{pid}")
    try:
        ran_ns, queued_ns, _ = (thread / "schedstat").read_text().split()
        # The format is `pid (comm) state ...`, and comm may contain anything.
        state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, ValueError, IndexError):
        return None
    return ThreadTimes(int(ran_ns) * _NS, int(queued_ns) * _NS, state)


@dataclass(frozen=True)
class BlockedTime:
    """The time for which a loop has not answered because its thread was busy, in seconds."""

    ran_s: float = 0.0
    slept_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.ran_s + self.slept_s

    def then(self, before: ThreadTimes | None, now: ThreadTimes | None, passed_s: float, limit_s: float) -> BlockedTime:
        """Return the sum of this time and that of a further interval of `passed_s` without an answer.

        At most `limit_s` of the interval counts: if this process did not run either, it may have left an answer unread.
        Without the kernel's counts, all of the interval counts as sleep.
        """
        if before is None or now is None:
            return BlockedTime(self.ran_s, self.slept_s + min(passed_s, limit_s))
        ran_s = now.ran_s - before.ran_s
        slept_s = passed_s - ran_s - (now.queued_s - before.queued_s) if now.state == ASLEEP else 0.0
        ran_s = min(ran_s, limit_s)
        return BlockedTime(self.ran_s + ran_s, self.slept_s + min(max(slept_s, 0.0), limit_s - ran_s))


def explained(blocked: BlockedTime, stack: str, home: Home) -> str:
    """Return what blocks the loop of a workflow, and the remedy: `asleep in time.sleep(60); ...`.

    `stack` is that of the loop's thread, innermost line first, and may be empty.
    """
    lines = stack_lines(stack)
    user = users_line(lines, home)
    where = f" in {_call(lines[0], user)}" if lines else ""
    if blocked.ran_s >= blocked.slept_s:
        return f"computing{where}; {_ON_A_THREAD}"
    calls = lines[: lines.index(user)] if user is not None else lines[:1]
    if any((_name(call.file), call.function) in _LOCK_WAITS for call in calls):
        return f"waiting for {_LOCK}"
    return f"asleep{where}; use a call that can be awaited (asyncio.sleep, an async client), or {_ON_A_THREAD}"


def _call(innermost: StackLine, user: StackLine | None) -> str:
    """Return the library's function in which the user's line waits, or the source of that line if Python calls none."""
    if innermost == user:
        source = linecache.getline(innermost.file, innermost.line).partition("  #")[0].strip()
        return source if 0 < len(source) <= SOURCE_CHARS else innermost.function
    return f"{innermost.function} ({_name(innermost.file)}:{innermost.line})"


def _name(file: str) -> str:
    return file.rpartition("/")[2]
