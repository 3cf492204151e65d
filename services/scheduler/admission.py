"""The order in which train tasks are consumed: a window of admission numbers from the oldest live task on.

It knows positions only, never what a task is. All operations are amortised O(1), or O(log n) in the number of drops
inside the window.
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
    """Admission numbers `[head, tail)`: neither batched nor (all) dropped. Each stands for a slot of the table."""

    def __init__(self, *, by_completion: bool = False) -> None:
        """`by_completion`: tasks may be taken in the order they became ready, which is kept only then."""
        self.head = 0
        self._base = 0  # admission number of _slots[0]; head - _base cells in front are used up
        self._slots = array("q")
        self._marks = bytearray()  # searched and counted a million at a time: when a gap closes, nobody waits for it
        self._prefix = 0  # every number in [head, _prefix) is ready or dropped
        self._ready_in_prefix = 0
        self._dropped: list[int] = []
        self._finished: deque[int] | None = deque() if by_completion else None
        """Ready numbers in the order they became so."""

    @property
    def tail(self) -> int:
        return self._base + len(self._slots)

    @property
    def live(self) -> int:
        """Tasks in the window that are not dropped."""
        return self.tail - self.head - len(self._dropped)

    @property
    def ready(self) -> int:
        """How many tasks from the oldest on are ready without a gap: only these can be consumed."""
        return self._ready_in_prefix

    @property
    def ready_anywhere(self) -> int:
        """How many tasks are ready, those behind a gap included (`consume: completion`)."""
        return self._marks.count(_READY)

    def admit(self, slots: Sequence[int]) -> int:
        """Append tasks; returns the admission number of the first."""
        first = self.tail
        self._slots.extend(slots)
        self._marks.extend(bytes(len(slots)))
        return first

    def slot(self, admission: int) -> int:
        return self._slots[admission - self._base]

    def rank(self, admission: int) -> int:
        """How many live tasks of the window come before this one."""
        return admission - self.head - bisect_left(self._dropped, admission)

    def mark_ready(self, admission: int) -> None:
        self._marks[admission - self._base] = _READY
        if self._finished is not None:
            self._finished.append(admission)
        self._advance()

    def mark_unready(self, admission: int) -> None:
        """A task that was ready (or not) has to be made again."""
        self._marks[admission - self._base] = _WAITS
        if self._finished is not None and admission in self._finished:
            self._finished.remove(admission)
        if admission < self._prefix:
            self._prefix = admission
            self._ready_in_prefix = self._marks.count(_READY, self.head - self._base, admission - self._base)

    def members(self) -> list[tuple[int, int]]:
        """(admission number, slot) of every live task of the window, in order."""
        numbered = enumerate(self._slots[self.head - self._base :], self.head)
        return [(admission, slot) for admission, slot in numbered if slot != _DROPPED]

    def ready_members(self) -> list[int]:
        """Admission numbers of the ready tasks, in the order they became ready; only `by_completion`."""
        return list(self._finished or ())

    def mark_dropped(self, admission: int) -> None:
        self._slots[admission - self._base] = _DROPPED
        self._marks[admission - self._base] = _GONE
        insort(self._dropped, admission)
        self._advance()

    def take(self, count: int) -> list[int]:
        """Remove the oldest `count` ready tasks; returns their slots in order. Needs `ready >= count`."""
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
        """Every number before this one is ready or dropped."""
        return self._prefix

    def take_through(self, end: int) -> list[int]:
        """Remove all numbers before `end`; returns the slots of those not dropped, in order. Needs `settled >= end`."""
        taken = [slot for slot in self._slots[self.head - self._base : end - self._base] if slot != _DROPPED]
        self.head = end
        del self._dropped[: bisect_left(self._dropped, end)]
        self._ready_in_prefix -= len(taken)
        self._compact()
        return taken

    def reopen(self, slots: Sequence[int]) -> None:
        """Put tasks that were taken back before the head, none of them ready: the last before it is `slots[-1]`."""
        kept = self.head - self._base
        self._slots = array("q", slots) + self._slots[kept:]
        self._marks = bytearray(len(slots)) + self._marks[kept:]
        self.head = self._base = self._prefix = self.head - len(slots)
        self._ready_in_prefix = 0

    def restart(self) -> None:
        """Forget every task; numbers go on after the last one that was given."""
        self.head = self._base = self._prefix = self.tail
        self._slots = array("q")
        self._marks = bytearray()
        self._ready_in_prefix = 0
        self._dropped = []
        if self._finished is not None:
            self._finished = deque()

    def take_completed(self, count: int) -> list[int]:
        """Remove the `count` tasks that became ready first, wherever they stand; needs `ready_anywhere >= count`.

        Their numbers then count as dropped: they stand in nobody's way. Only `by_completion`.
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
        """Numbers, and cells by name."""
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
