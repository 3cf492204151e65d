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
from services.batch_store.spares import SHARE, Spares
from shared.rpc.errors import RpcError

PAGE_BYTES = 4096
RETRY_AFTER_S = 0.2


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
        self._spares = Spares(memory_bytes // SHARE)
        """Files that nobody can find or maps: their pages count as used."""
        self._spare_bytes = self._lent = 0
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

    def count_lent(self) -> None:
        """A put was given the pages of a spare."""
        self._lent += 1

    def _reserve(self, nbytes: int, spare: str | None) -> None:
        """Take room in memory, that of a spare included, which is none any more; or raise busy."""
        memory, disk = self.limits
        if self._missing_bytes(nbytes, spare) > 0:
            self.count_busy()
            spill = f"{self._used[Place.DISK]} of {disk} of the spill" if disk else "spill is off"
            raise RpcError(
                ErrorCode.BUSY,
                f"{self._name}: put of {nbytes} bytes refused: {self._used[Place.MEMORY]} of {memory} in use, {spill}; "
                "raise services.batch-store.memory or spill_limit, or checkpoint more often",
                retry_after_s=RETRY_AFTER_S,
            )
        if spare is not None:
            self._used[Place.MEMORY] -= self._take_spare(spare)
        self._used[Place.MEMORY] += held_bytes(nbytes)

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

    def keep(self, target: str, now: float) -> bool:
        """Nobody maps this zombie any more. True: it is a spare now; False: delete it, it is `reaped`."""
        if target not in self._worth_keeping:
            return False
        _, held = self._zombies.pop(target)
        self._zombie_bytes -= held
        self._spare_bytes += held
        self._spares.add(target, self._worth_keeping.pop(target), now)
        return True

    def surplus(self, now: float) -> list[str]:
        """Spares that nobody took, or too many of them: zombies again, to be deleted and `reaped`."""
        return [self.give_up_spare(name) for name in self._spares.surplus(now)]

    def give_up_spares(self) -> list[str]:
        """All of them: their pages may be what a full mount lacks."""
        return [self.give_up_spare(name) for name in self._spares.all_but(None)]

    def give_up_spare(self, name: str) -> str:
        """It is a zombie again, to be deleted and `reaped`."""
        held = self._take_spare(name)
        self._zombies[name] = (Place.MEMORY, held)
        self._zombie_bytes += held
        return name

    def _take_spare(self, name: str) -> int:
        """It is none any more; returns the bytes of its pages."""
        held = held_bytes(self._spares.take(name))
        self._spare_bytes -= held
        return held

    def _missing_bytes(self, nbytes: int, spare: str | None) -> int:
        """How far a put that takes this spare would pass the limit of memory."""
        freed = held_bytes(self._spares.size(spare)) if spare is not None else 0
        return self._used[Place.MEMORY] - freed + held_bytes(nbytes) - self.limits[Place.MEMORY]

    def _free_spares(self, nbytes: int, spare: str | None) -> list[str]:
        """Give up as many spares as a put that takes `spare` needs the room of, the longest idle first."""
        missing = self._missing_bytes(nbytes, spare)
        names: list[str] = []
        for name in self._spares.all_but(spare) if missing > 0 else ():
            if missing <= 0:
                break
            missing -= held_bytes(self._spares.size(name))
            names.append(self.give_up_spare(name))
        return names
