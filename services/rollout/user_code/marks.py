"""Memory shared by the service and a process that runs users' code, to show which call's code is running.

The memory outlives the process, so that the service can identify the call that ended the process. Only the process
writes to it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

from services.rollout.user_code.frames import SLOTS

_CURRENT = struct.Struct("<q")
_TOOLS = struct.Struct("<H")
_BYTES = _CURRENT.size + (SLOTS + 1) * _TOOLS.size  # slots are numbered from 1
_NOBODY = 0


def make_marks() -> int:
    """Create marks and return their descriptor, which both processes use."""
    descriptor = os.memfd_create("rlbus-marks")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class Marks:
    """A mapping of the marks behind a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _BYTES)
        self._lock = threading.Lock()

    def enter(self, slot: int) -> None:
        """Mark that the loop is running the slot's code."""
        _CURRENT.pack_into(self._map, 0, slot)

    def leave(self) -> None:
        _CURRENT.pack_into(self._map, 0, _NOBODY)

    def tool(self, slot: int, change: int) -> None:
        """Count one running tool more (1) or fewer (-1) for the slot. Any thread may call this."""
        with self._lock:
            at = _CURRENT.size + slot * _TOOLS.size
            _TOOLS.pack_into(self._map, at, max(0, min(0xFFFF, _TOOLS.unpack_from(self._map, at)[0] + change)))

    def current(self) -> int | None:
        """Return the slot whose code the loop is running, or None."""
        slot: int = _CURRENT.unpack_from(self._map, 0)[0]
        return None if slot == _NOBODY else slot

    def tools(self, slot: int) -> int:
        """Return how many of the slot's tools are running."""
        count: int = _TOOLS.unpack_from(self._map, _CURRENT.size + slot * _TOOLS.size)[0]
        return count

    def close(self) -> None:
        self._map.close()
