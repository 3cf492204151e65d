"""What a store's files take of memory and of the spill, and the files on their way out. No I/O, no clock; it must never
let the bytes it answers for pass a limit.

A file that leaves is a zombie first: renamed so that nobody finds it, counted until the kernel says that nobody maps
it. There is no way back from zombie to sealed: a name is never used again, a spare lends its pages to a grant under
the grant's own name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

PAGE_BYTES = 4096
RETRY_AFTER_S = 0.2
SPARE_BYTES = 32 << 20
MAX_SPARES = 2
"""Fresh pages are four fifths of the time that a put of a large model takes (1 GiB: 0.41 s, onto pages that a process
has mapped already 0.06), and every version has the size of the one before: the pages of so many versions are kept."""


class Place(IntEnum):
    """Where a file lies."""

    MEMORY = 0
    DISK = 1


def held_bytes(nbytes: int) -> int:
    """What a file of `nbytes` takes of shared memory: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Retire:
    """Effect: rename file `source` to `target` (a zombie), then delete it once nobody maps it."""

    source: str
    target: str
    place: Place = Place.MEMORY


class Room:
    """Bytes by place, zombies and spares."""

    def __init__(self, name: str, memory_bytes: int, incarnation: int, spill_bytes: int) -> None:
        """Limits of memory and of the spill folder. `incarnation` keeps zombies' names apart from a former life's."""
        self.limits = (memory_bytes, spill_bytes)
        """By `Place`."""
        self._name = name
        self._incarnation = incarnation
        self._zombies: dict[str, tuple[Place, int]] = {}
        self._worth_keeping: dict[str, int] = {}
        """Zombies that may become spares, and the exact size of the file."""
        self._spares: dict[str, int] = {}
        """Files that nobody can find or maps, by name, and their exact size: their pages count as used."""
        self._used = [0, 0]
        self._zombie_bytes = self._retired = self._busy = 0

    @property
    def limit_bytes(self) -> int:
        """Memory and spill together."""
        return sum(self.limits)

    def used(self, place: Place) -> int:
        """Bytes that lie there or are promised there, in whole pages."""
        return self._used[place]

    def count_busy(self) -> None:
        """A producer has to wait: for room under the limit, or for room on the mount."""
        self._busy += 1

    def _reserve(self, nbytes: int) -> None:
        """Take room in memory or raise busy."""
        need = held_bytes(nbytes)
        memory, disk = self.limits
        if self._used[Place.MEMORY] + need > memory:
            self.count_busy()
            spill = f"{self._used[Place.DISK]} of {disk} of the spill" if disk else "spill is off"
            raise RpcError(
                ErrorCode.BUSY,
                f"{self._name}: put of {nbytes} bytes refused: {self._used[Place.MEMORY]} of {memory} in use, {spill}; "
                "raise services.batch-store.memory or spill_limit, or checkpoint more often",
                retry_after_s=RETRY_AFTER_S,
            )
        self._used[Place.MEMORY] += need

    # ---- the end of files

    def _retire(self, source: str, nbytes: int, place: Place = Place.MEMORY) -> Retire:
        self._retired += 1
        target = f"{source.partition('.')[0]}.{self._incarnation:x}-{self._retired}.dead"
        self._zombies[target] = (place, held_bytes(nbytes))
        self._zombie_bytes += held_bytes(nbytes)
        return Retire(source, target, place)

    def reaped(self, target: str) -> None:
        """Nobody maps this zombie any more and it was deleted."""
        place, nbytes = self._zombies.pop(target)
        self._worth_keeping.pop(target, None)
        self._used[place] -= nbytes
        self._zombie_bytes -= nbytes

    # ---- spares

    def keep(self, target: str) -> bool:
        """Nobody maps this zombie any more. True: it is a spare now; False: delete it, it is `reaped`."""
        if target not in self._worth_keeping or len(self._spares) >= MAX_SPARES:
            return False
        _, held = self._zombies.pop(target)
        self._zombie_bytes -= held
        self._spares[target] = self._worth_keeping.pop(target)
        return True

    def spare(self, nbytes: int) -> str | None:
        """The spare whose pages fit a put of `nbytes` exactly."""
        return next((name for name, size in self._spares.items() if size == nbytes), None)

    def spend(self, name: str) -> None:
        """A spare's pages are no longer its own: the grant that begins at once takes them, or they are freed."""
        self._used[Place.MEMORY] -= held_bytes(self._spares.pop(name))

    def give_up_spares(self) -> list[str]:
        """Room is wanted: all spares are zombies again, to be deleted and `reaped`."""
        names = list(self._spares)
        for name in names:
            held = held_bytes(self._spares.pop(name))
            self._zombies[name] = (Place.MEMORY, held)
            self._zombie_bytes += held
        return names
