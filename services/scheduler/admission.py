"""The order in which training tasks are consumed: a window of admission numbers that begins at the oldest live task.

The window knows positions only, not the tasks themselves. All operations are amortised O(1), or O(log n) in the number
of drops inside the window.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

_DROPPED = -1
_COMPACT = 4096
_WAITS, _READY, _GONE = range(3)


class Window:
    """Admission numbers `[head, tail)`, not batched yet. Each maps to a slot of the task table or to a dropped task."""

    def __init__(self, *, by_completion: bool = False) -> None:
        """With `by_completion` the window also records the order in which tasks become ready, for `take_completed`."""
        self.head = 0
        self._base = 0  # admission number of _slots[0]; the first head - _base cells are used up
        self._slots = array("q")
        self._marks = bytearray()  # a million marks are searched and counted at once: closing a gap delays no request
        self._prefix = 0  # every number in [head, _prefix) is ready or dropped
        self._ready_in_prefix = 0
        self._dropped: list[int] = []
        self._finished: deque[int] | None = deque() if by_completion else None
        """Ready admission numbers, in the order in which they became ready."""

    @property
    def tail(self) -> int:
        return self._base + len(self._slots)

    @property
    def live(self) -> int:
        """Number of tasks in the window that are not dropped."""
        return self.tail - self.head - len(self._dropped)

    @property
    def ready(self) -> int:
        """Number of ready tasks before the first one that is not ready. Only these can be consumed in order."""
        return self._ready_in_prefix

    @property
    def ready_anywhere(self) -> int:
        """Number of ready tasks, including those behind a gap (`consume: completion`)."""
        return self._marks.count(_READY)

    def admit(self, slots: Sequence[int]) -> int:
        """Append tasks and return the admission number of the first."""
        first = self.tail
        self._slots.extend(slots)
        self._marks.extend(bytes(len(slots)))
        return first

    def slot(self, admission: int) -> int:
        return self._slots[admission - self._base]

    def rank(self, admission: int) -> int:
        """Return the number of live tasks in the window before this one."""
        return admission - self.head - bisect_left(self._dropped, admission)

    def mark_ready(self, admission: int) -> None:
        self._marks[admission - self._base] = _READY
        if self._finished is not None:
            self._finished.append(admission)
        self._advance()

    def mark_unready(self, admission: int) -> None:
        """Mark a task as not ready because it has to be sampled again. It need not have been ready."""
        self._marks[admission - self._base] = _WAITS
        if self._finished is not None and admission in self._finished:
            self._finished.remove(admission)
        if admission < self._prefix:
            self._prefix = admission
            self._ready_in_prefix = self._marks.count(_READY, self.head - self._base, admission - self._base)

    def members(self) -> list[tuple[int, int]]:
        """Return (admission number, slot) of every live task of the window, in order."""
        numbered = enumerate(self._slots[self.head - self._base :], self.head)
        return [(admission, slot) for admission, slot in numbered if slot != _DROPPED]

    def ready_members(self) -> list[int]:
        """Return the ready admission numbers in the order in which they became ready. Empty unless `by_completion`."""
        return list(self._finished or ())

    def mark_dropped(self, admission: int) -> None:
        self._slots[admission - self._base] = _DROPPED
        self._marks[admission - self._base] = _GONE
        insort(self._dropped, admission)
        self._advance()

    def take(self, count: int) -> list[int]:
        """Remove the oldest `count` ready tasks and return their slots in order. Requires `ready >= count`."""
        taken: list[int] = []
        passed = 0
        while len(taken) < count:
            slot = self._slots[self.head - self._base]
            if slot == _DROPPED:
                passed += 1
            else:
                taken.append(slot)
            self._marks[self.head - self._base] = _GONE
            self.head += 1
        del self._dropped[:passed]
        self._ready_in_prefix -= count
        self._compact()
        return taken

    @property
    def settled(self) -> int:
        """The first number that is neither ready nor dropped, or `tail`."""
        return self._prefix

    def take_through(self, end: int) -> list[int]:
        """Remove all numbers before `end` and return the slots of the live ones in order. Requires `settled >= end`."""
        taken = [slot for slot in self._slots[self.head - self._base : end - self._base] if slot != _DROPPED]
        self.head = end
        del self._dropped[: bisect_left(self._dropped, end)]
        self._ready_in_prefix -= len(taken)
        self._compact()
        return taken

    def reopen(self, slots: Sequence[int]) -> None:
        """Insert tasks that were taken back before the head, not ready. `slots[-1]` is directly before the old head."""
        kept = self.head - self._base
        self._slots = array("q", slots) + self._slots[kept:]
        self._marks = bytearray(len(slots)) + self._marks[kept:]
        self.head = self._base = self._prefix = self.head - len(slots)
        self._ready_in_prefix = 0

    def restart(self) -> None:
        """Remove every task. Admission numbers continue after the last one that was assigned."""
        self.head = self._base = self._prefix = self.tail
        self._slots = array("q")
        self._marks = bytearray()
        self._ready_in_prefix = 0
        self._dropped = []
        if self._finished is not None:
            self._finished = deque()

    def take_completed(self, count: int) -> list[int]:
        """Remove the `count` tasks that became ready first and return their slots. Requires `ready_anywhere >= count`.

        Their numbers then count as dropped, so that they leave no gap. Only with `by_completion`.
        """
        taken: list[int] = []
        for admission in self.ready_members()[:count]:
            taken.append(self.slot(admission))
            self.mark_unready(admission)
            self.mark_dropped(admission)
        passed = 0
        while self.head < self.tail and self._slots[self.head - self._base] == _DROPPED:
            self.head += 1
            passed += 1
        del self._dropped[:passed]
        self._prefix = max(self._prefix, self.head)
        self._compact()
        return taken

    def _compact(self) -> None:
        if self.head - self._base >= _COMPACT and 2 * (self.head - self._base) >= len(self._slots):
            used = self.head - self._base
            del self._slots[:used]
            del self._marks[:used]
            self._base = self.head

    def _advance(self) -> None:
        begin = self._prefix - self._base
        end = self._marks.find(_WAITS, begin)
        if end < 0:
            end = len(self._marks)
        self._ready_in_prefix += self._marks.count(_READY, begin, end)
        self._prefix = self._base + end

    def dump(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the state as plain values, and the bytes of the arrays by name."""
        used = self.head - self._base
        numbers = {
            "head": self.head,
            "prefix": self._prefix,
            "ready_in_prefix": self._ready_in_prefix,
            "dropped": list(self._dropped),
            "finished": self.ready_members(),
        }
        return numbers, {"window": self._slots[used:].tobytes(), "marks": bytes(self._marks[used:])}

    @classmethod
    def load(cls, data: dict[str, Any], cells: dict[str, bytearray], *, by_completion: bool) -> Window:
        window = cls(by_completion=by_completion)
        window.head = window._base = data["head"]
        window._slots.frombytes(cells["window"])
        window._marks = cells["marks"]
        window._prefix = data["prefix"]
        window._ready_in_prefix = data["ready_in_prefix"]
        window._dropped = list(data["dropped"])
        if by_completion:
            window._finished = deque(data["finished"])
        return window
