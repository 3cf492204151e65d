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


class Window:
    """Admission numbers `[head, tail)`: neither batched nor (all) dropped. Each stands for a slot of the table."""

    def __init__(self) -> None:
        self.head = 0
        self._base = 0  # admission number of _slots[0]; head - _base cells in front are used up
        self._slots = array("q")
        self._ready = bytearray()
        self._prefix = 0  # every number in [head, _prefix) is ready or dropped
        self._ready_in_prefix = 0
        self._dropped: list[int] = []
        self._finished: deque[int] = deque()
        """Ready numbers in the order they became so; those that were taken or dropped since are skipped."""

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
        return self._ready.count(1)

    def admit(self, slot: int) -> int:
        """Append a task; returns its admission number."""
        self._slots.append(slot)
        self._ready.append(0)
        return self.tail - 1

    def place(self, slot: int) -> None:
        """Set the slot of the newest admission number, once it is known."""
        self._slots[-1] = slot

    def slot(self, admission: int) -> int:
        return self._slots[admission - self._base]

    def rank(self, admission: int) -> int:
        """How many live tasks of the window come before this one."""
        return admission - self.head - bisect_left(self._dropped, admission)

    def mark_ready(self, admission: int) -> None:
        self._ready[admission - self._base] = 1
        self._finished.append(admission)
        self._advance()

    def mark_unready(self, admission: int) -> None:
        """A task that was ready (or not) has to be made again."""
        self._ready[admission - self._base] = 0
        if admission in self._finished:
            self._finished.remove(admission)
        if admission < self._prefix:
            self._prefix = admission
            before = range(self.head - self._base, admission - self._base)
            self._ready_in_prefix = sum(self._ready[offset] for offset in before)

    def members(self) -> list[tuple[int, int]]:
        """(admission number, slot) of every live task of the window, in order."""
        numbered = enumerate(self._slots[self.head - self._base :], self.head)
        return [(admission, slot) for admission, slot in numbered if slot != _DROPPED]

    def ready_members(self) -> list[int]:
        """Admission numbers of the ready tasks, in the order they became ready."""
        self._skip_taken()
        return [admission for admission in self._finished if admission >= self.head]

    def mark_dropped(self, admission: int) -> None:
        self._slots[admission - self._base] = _DROPPED
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
            self._ready[self.head - self._base] = 0
            self.head += 1
        del self._dropped[:passed]
        self._ready_in_prefix -= count
        self._skip_taken()
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
        self._skip_taken()
        self._compact()
        return taken

    def reopen(self, slots: Sequence[int]) -> None:
        """Put tasks that were taken back before the head, none of them ready: the last before it is `slots[-1]`."""
        kept = self.head - self._base
        self._slots = array("q", slots) + self._slots[kept:]
        self._ready = bytearray(len(slots)) + self._ready[kept:]
        self.head = self._base = self._prefix = self.head - len(slots)
        self._ready_in_prefix = 0

    def take_completed(self, count: int) -> list[int]:
        """Remove the `count` tasks that became ready first, wherever they stand; needs `ready_anywhere >= count`.

        Their numbers then count as dropped: they stand in nobody's way.
        """
        taken: list[int] = []
        while len(taken) < count:
            admission = self._finished[0]
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

    def _skip_taken(self) -> None:
        while self._finished and self._finished[0] < self.head:
            self._finished.popleft()

    def _compact(self) -> None:
        if self.head - self._base >= _COMPACT and 2 * (self.head - self._base) >= len(self._slots):
            used = self.head - self._base
            del self._slots[:used]
            del self._ready[:used]
            self._base = self.head

    def _advance(self) -> None:
        while self._prefix < self.tail:
            offset = self._prefix - self._base
            if self._ready[offset]:
                self._ready_in_prefix += 1
            elif self._slots[offset] != _DROPPED:
                return
            self._prefix += 1

    def dump(self) -> dict[str, Any]:
        used = self.head - self._base
        return {
            "head": self.head,
            "slots": self._slots[used:].tobytes(),
            "ready": bytes(self._ready[used:]),
            "prefix": self._prefix,
            "ready_in_prefix": self._ready_in_prefix,
            "dropped": list(self._dropped),
            "finished": self.ready_members(),
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Window:
        window = cls()
        window.head = window._base = data["head"]
        window._slots.frombytes(data["slots"])
        window._ready = bytearray(data["ready"])
        window._prefix = data["prefix"]
        window._ready_in_prefix = data["ready_in_prefix"]
        window._dropped = list(data["dropped"])
        window._finished = deque(data["finished"])
        return window
