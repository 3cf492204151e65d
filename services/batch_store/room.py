"""Accounts for the bytes of a store's files in memory and in the spill, up to their deletion. No I/O, no clock. The
bytes in use never exceed a limit.

A file that is removed first becomes a zombie: it is renamed so that no reader finds it, and counted until the kernel
reports that no process maps it. A zombie never becomes sealed again: names are not reused, and a spare lends its pages
to a grant under the name of the grant.
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
    """The folder in which a file lies."""

    MEMORY = 0
    DISK = 1


def held_bytes(nbytes: int) -> int:
    """Return the shared memory that a file of `nbytes` takes, in bytes of whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Retire:
    """Effect: rename file `source` to `target` (a zombie), then delete it once no process maps it."""

    source: str
    target: str
    place: Place = Place.MEMORY


class Room:
    """Bytes in use by place, zombies and spares."""

    def __init__(self, name: str, memory_bytes: int, incarnation: int, spill_bytes: int) -> None:
        """Take the limits of memory and of the spill. `incarnation` makes zombie names differ from a former life's."""
        self.limits = (memory_bytes, spill_bytes)
        """Indexed by `Place`."""
        self._name = name
        self._incarnation = incarnation
        self._zombies: dict[str, tuple[Place, int]] = {}
        self._spare_candidates: dict[str, int] = {}
        """Zombies that may become spares -> exact size of the file in bytes."""
        self._spares = Spares(memory_bytes // SHARE)
        """Files that no reader can find and no process maps. Their pages count as used."""
        self._spare_bytes = self._lent = 0
        self._used = [0, 0]
        self._zombie_bytes = self._retired = self._busy = 0

    @property
    def limit_bytes(self) -> int:
        """Sum of the limits of memory and spill."""
        return sum(self.limits)

    def used(self, place: Place) -> int:
        """Return the bytes stored or reserved in `place`, in whole pages."""
        return self._used[place]

    def count_busy(self) -> None:
        """Count a producer that has to wait for room, under the limit or on the mount."""
        self._busy += 1

    def count_lent(self) -> None:
        """Count a put that was given the pages of a spare."""
        self._lent += 1

    def _reserve(self, nbytes: int, spare: str | None) -> None:
        """Reserve room in memory, using up `spare`. Raises RpcError(busy) if there is not enough."""
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

    # ---- zombies

    def _retire(self, source: str, nbytes: int, place: Place = Place.MEMORY) -> Retire:
        self._retired += 1
        target = f"{source.partition('.')[0]}.{self._incarnation:x}-{self._retired}.dead"
        self._zombies[target] = (place, held_bytes(nbytes))
        self._zombie_bytes += held_bytes(nbytes)
        return Retire(source, target, place)

    def reaped(self, target: str) -> None:
        """Forget a zombie that no process maps and that was deleted."""
        place, nbytes = self._zombies.pop(target)
        self._spare_candidates.pop(target, None)
        self._used[place] -= nbytes
        self._zombie_bytes -= nbytes

    # ---- spares

    def keep(self, target: str, now: float) -> bool:
        """Turn a zombie that no process maps into a spare. If this returns False, delete the file and call `reaped`."""
        if target not in self._spare_candidates:
            return False
        _, held = self._zombies.pop(target)
        self._zombie_bytes -= held
        self._spare_bytes += held
        self._spares.add(target, self._spare_candidates.pop(target), now)
        return True

    def surplus(self, now: float) -> list[str]:
        """Give up spares that are idle for too long or too many. The caller deletes them and calls `reaped`."""
        return [self.give_up_spare(name) for name in self._spares.surplus(now)]

    def give_up_spares(self) -> list[str]:
        """Give up all spares, whose pages a full mount may need."""
        return [self.give_up_spare(name) for name in self._spares.all_but(None)]

    def give_up_spare(self, name: str) -> str:
        """Turn a spare into a zombie, to be deleted and then `reaped`. Returns its name."""
        held = self._take_spare(name)
        self._zombies[name] = (Place.MEMORY, held)
        self._zombie_bytes += held
        return name

    def _take_spare(self, name: str) -> int:
        """Remove a spare and return the bytes of its pages."""
        held = held_bytes(self._spares.take(name))
        self._spare_bytes -= held
        return held

    def _missing_bytes(self, nbytes: int, spare: str | None) -> int:
        """Return by how many bytes a put that takes this spare would exceed the limit of memory."""
        freed = held_bytes(self._spares.size(spare)) if spare is not None else 0
        return self._used[Place.MEMORY] - freed + held_bytes(nbytes) - self.limits[Place.MEMORY]

    def _free_spares(self, nbytes: int, spare: str | None) -> list[str]:
        """Give up the spares whose room a put that takes `spare` needs, longest idle first."""
        missing = self._missing_bytes(nbytes, spare)
        names: list[str] = []
        for name in self._spares.all_but(spare) if missing > 0 else ():
            if missing <= 0:
                break
            missing -= held_bytes(self._spares.size(name))
            names.append(self.give_up_spare(name))
        return names
