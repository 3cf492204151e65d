"""Memory that a workflow process and the service share: whose code runs at this moment. It outlives the process, so a
death can be told from its bystanders. Must never be written by more than one process.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

from services.rollout.workflows.frames import SLOTS

_CURRENT = struct.Struct("<q")
_TOOLS = struct.Struct("<H")
_BYTES = _CURRENT.size + (SLOTS + 1) * _TOOLS.size  # slots count from 1
_NOBODY = 0


def make_marks() -> int:
    """A descriptor of fresh marks, for both ends."""
    descriptor = os.memfd_create("rlbus-workflow-marks")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class Marks:
    """A view of the marks behind a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _BYTES)
        self._lock = threading.Lock()

    def enter(self, slot: int) -> None:
        """The loop runs the slot's code now."""
        _CURRENT.pack_into(self._map, 0, slot)

    def leave(self) -> None:
        _CURRENT.pack_into(self._map, 0, _NOBODY)

    def tool(self, slot: int, change: int) -> None:
        """One tool more (1) or less (-1) runs for the slot. From any thread."""
        with self._lock:
            at = _CURRENT.size + slot * _TOOLS.size
            _TOOLS.pack_into(self._map, at, max(0, min(0xFFFF, _TOOLS.unpack_from(self._map, at)[0] + change)))

    def current(self) -> int | None:
        """The slot whose code the loop runs."""
        slot: int = _CURRENT.unpack_from(self._map, 0)[0]
        return None if slot == _NOBODY else slot

    def tools(self, slot: int) -> int:
        """How many tools run for the slot."""
        count: int = _TOOLS.unpack_from(self._map, _CURRENT.size + slot * _TOOLS.size)[0]
        return count

    def close(self) -> None:
        self._map.close()
