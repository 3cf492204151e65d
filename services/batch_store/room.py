"""Accounts for the bytes of a store's files, in memory and in the spill, until the files are deleted. The bytes in use
never exceed a limit. The module uses no I/O and no clock.

A file to be removed first becomes a zombie: it is renamed so that no reader finds it, and counted until the kernel
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


class Tier(IntEnum):
    """The folder that contains a file."""

    MEMORY = 0
    DISK = 1


def held_bytes(nbytes: int) -> int:
    """Return the amount of shared memory that a file of `nbytes` takes up, in bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Removal:
    """Effect: rename file `source` to `target` (a zombie), then delete it once no process maps it."""

    source: str
    target: str
    place: Tier = Tier.MEMORY


class Room:
    """The bytes in use in each place, the zombies and the spares."""

    def __init__(self, name: str, memory_bytes: int, incarnation: int, spill_bytes: int) -> None:
        """`memory_bytes` and `spill_bytes` are the limits. `incarnation` makes the names of zombies unique across
        restarts.
        """
        self.limits = (memory_bytes, spill_bytes)
        """Indexed by `Tier`."""
        self._name = name
        self._incarnation = incarnation
        self._zombies: dict[str, tuple[Tier, int]] = {}
        self._spare_candidates: dict[str, int] = {}
        """Zombies that may become spares -> exact size of the file in bytes."""
        self._spares = Spares(memory_bytes // SHARE)
        """Files that no reader can find and no process maps. Their pages count as used."""
        self.used = [0, 0]
        """Bytes stored or reserved, in whole pages, indexed by `Tier`."""
        self.zombie_bytes = self.spare_bytes = 0
        self.lent = 0
        """Number of puts that were given the pages of a spare."""
        self.busy = 0
        """Number of times that a producer had to wait for room, under the limit or on the mount."""
        self._retired = 0

    @property
    def limit_bytes(self) -> int:
        """Sum of the limits on memory and spill."""
        return sum(self.limits)

    def add(self, nbytes: int, place: Tier) -> None:
        """Count a file that is in `place`, or for which room has been found in `place`."""
        self.used[place] += held_bytes(nbytes)

    def remove(self, nbytes: int, place: Tier) -> None:
        """Stop counting a file that was not created."""
        self.used[place] -= held_bytes(nbytes)

    def reserve(self, nbytes: int, spare: str | None) -> None:
        """Reserve room in memory, using up `spare`. Raises RpcError(busy) if there is not enough."""
        memory, disk = self.limits
        if self.missing_bytes(nbytes, spare) > 0:
            self.busy += 1
            spill = f"{self.used[Tier.DISK]} of {disk} of the spill" if disk else "spill is off"
            raise RpcError(
                ErrorCode.BUSY,
                f"{self._name}: put of {nbytes} bytes refused: {self.used[Tier.MEMORY]} of {memory} in use, {spill}; "
                "raise services.batch-store.memory or spill_limit, or checkpoint more often",
                retry_after_s=RETRY_AFTER_S,
            )
        if spare is not None:
            self.used[Tier.MEMORY] -= self._take_spare(spare)
        self.add(nbytes, Tier.MEMORY)

    # ---- zombies

    def retire(self, source: str, nbytes: int, place: Tier = Tier.MEMORY, *, lend: bool = False) -> Removal:
        """Turn a file into a zombie, which may become a spare if `lend` is true."""
        self._retired += 1
        target = f"{source.partition('.')[0]}.{self._incarnation:x}-{self._retired}.dead"
        self._zombies[target] = (place, held_bytes(nbytes))
        self.zombie_bytes += held_bytes(nbytes)
        if lend and place == Tier.MEMORY and self._spares.fits(nbytes):
            self._spare_candidates[target] = nbytes
        return Removal(source, target, place)

    def reaped(self, target: str) -> None:
        """Forget a zombie that no process maps and that was deleted."""
        place, nbytes = self._zombies.pop(target)
        self._spare_candidates.pop(target, None)
        self.used[place] -= nbytes
        self.zombie_bytes -= nbytes

    # ---- spares

    def nearest(self, nbytes: int) -> str | None:
        """Return the spare whose pages a put of this size should take, or None if there is none."""
        return self._spares.nearest(nbytes)

    def keep(self, target: str, now: float) -> bool:
        """Turn a zombie that no process maps into a spare. If this returns False, delete the file and call `reaped`."""
        if target not in self._spare_candidates:
            return False
        _, held = self._zombies.pop(target)
        self.zombie_bytes -= held
        self.spare_bytes += held
        self._spares.add(target, self._spare_candidates.pop(target), now)
        return True

    def surplus(self, now: float) -> list[str]:
        """Give up spares that have been idle too long or exceed a limit. The caller deletes them and calls `reaped`."""
        return [self.give_up_spare(name) for name in self._spares.surplus(now)]

    def give_up_spares(self) -> list[str]:
        """Give up all spares, because a full mount may need their pages."""
        return [self.give_up_spare(name) for name in self._spares.all_but(None)]

    def give_up_spare(self, name: str) -> str:
        """Turn a spare into a zombie, to be deleted and then `reaped`, and return its name."""
        held = self._take_spare(name)
        self._zombies[name] = (Tier.MEMORY, held)
        self.zombie_bytes += held
        return name

    def _take_spare(self, name: str) -> int:
        """Remove a spare and return the size of its pages in bytes."""
        held = held_bytes(self._spares.take(name))
        self.spare_bytes -= held
        return held

    def missing_bytes(self, nbytes: int, spare: str | None) -> int:
        """Return the number of bytes by which a put that takes this spare would exceed the memory limit."""
        freed = held_bytes(self._spares.size(spare)) if spare is not None else 0
        return self.used[Tier.MEMORY] - freed + held_bytes(nbytes) - self.limits[Tier.MEMORY]

    def free_spares(self, nbytes: int, spare: str | None) -> list[str]:
        """Give up as many other spares, longest idle first, as a put that takes `spare` needs."""
        missing = self.missing_bytes(nbytes, spare)
        names: list[str] = []
        for name in self._spares.all_but(spare) if missing > 0 else ():
            if missing <= 0:
                break
            missing -= held_bytes(self._spares.size(name))
            names.append(self.give_up_spare(name))
        return names
