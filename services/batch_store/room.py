"""Accounts for the bytes of a store's files, in memory and in the spill, until the files are deleted. The bytes in use
never exceed a limit. The module uses no I/O and no clock.

A file to be removed first becomes a zombie: it is renamed so that no reader finds it, and counted until the kernel
reports that no process maps it. A zombie never becomes sealed again: names are not reused, and a spare lends its pages
to a grant under the name of the grant.

Spares are files whose pages the store keeps for later puts. A spare has no name that a reader could find.

A put spends three quarters of its time allocating fresh pages. Writing 1 GiB, including checksums, takes 0.58 s if the
pages are new, 0.22 s if they are old, and 0.13 s if they are old and the writer has already mapped them. Training puts
similar sizes at every step. Without spares, publishing 2 GiB ten times takes 1.5 times as long and twice the processor
time (medians of seven pairs on two busy cores). A spare is resized to the put that takes it, so a file takes up no more
room than its bytes need.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

PAGE_BYTES = 4096
RETRY_AFTER_S = 0.2
SPARE_BYTES = 256 << 10
"""Minimum size of a spare in bytes. Allocating the pages of a smaller file costs less than keeping it."""
SHARE = 2
"""The memory limit divided by this is the maximum size of all spares together, in bytes."""
MAX_SPARES = 4096
IDLE_S = 600.0
"""Seconds after which an unused spare is returned to the system. Most training steps are shorter."""
_FIT = 2
"""Maximum ratio, either way, between the sizes of a spare and a put. Beyond it, reuse saves little, or most of the
spare is cut off."""


class Spares:
    """Names and exact sizes of files that no process maps, longest idle first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._serial = 0
        self._by_name: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self._by_size: list[tuple[int, int, str]] = []
        self._nbytes = 0

    def fits(self, nbytes: int) -> bool:
        """Return whether a file of this size is worth keeping."""
        return SPARE_BYTES <= nbytes <= self._max_bytes

    def add(self, name: str, nbytes: int, now: float) -> None:
        """Add a spare. `surplus` enforces the limits."""
        self._serial += 1
        self._by_name[name] = (nbytes, self._serial, now)
        insort(self._by_size, (nbytes, self._serial, name))
        self._nbytes += nbytes

    def take(self, name: str) -> int:
        """Remove a spare and return its size in bytes."""
        nbytes, serial, _ = self._by_name.pop(name)
        del self._by_size[bisect_left(self._by_size, (nbytes, serial, name))]
        self._nbytes -= nbytes
        return nbytes

    def size(self, name: str) -> int:
        """Return the exact size of the file in bytes."""
        return self._by_name[name][0]

    def nearest(self, nbytes: int) -> str | None:
        """Return the spare nearest in size to a put, or None if none fits. If several fit exactly, return the
        youngest."""
        at = bisect_left(self._by_size, (nbytes + 1,))
        around = self._by_size[max(at - 1, 0) : at + 1]
        near = [spare for spare in around if spare[0] <= _FIT * nbytes and nbytes <= _FIT * spare[0]]
        return min(near, key=lambda spare: abs(spare[0] - nbytes))[2] if near else None

    def all_but(self, kept: str | None) -> list[str]:
        """Return all spares except `kept`, longest idle first."""
        return [name for name in self._by_name if name != kept]

    def surplus(self, now: float) -> list[str]:
        """Return the spares that have been idle for too long or exceed the limits. The caller takes them."""
        names: list[str] = []
        nbytes, count = self._nbytes, len(self._by_name)
        for name, (size, _, since) in self._by_name.items():
            if nbytes <= self._max_bytes and count <= MAX_SPARES and now - since <= IDLE_S:
                break
            names.append(name)
            nbytes -= size
            count -= 1
        return names


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
        self.limit_bytes = memory_bytes + spill_bytes
        self._name = name
        self._incarnation = incarnation
        self._zombies: dict[str, tuple[Tier, int]] = {}
        self._spare_candidates: dict[str, int] = {}
        """Zombies that may become spares -> exact size of the file in bytes."""
        self.spares = Spares(memory_bytes // SHARE)
        """Files that no reader can find and no process maps. Their pages count as used."""
        self.used = [0, 0]
        """Bytes stored or reserved, in whole pages, indexed by `Tier`."""
        self.zombie_bytes = self.spare_bytes = 0
        self.lent = 0
        """Number of puts that were given the pages of a spare."""
        self.busy = 0
        """Number of times that a producer had to wait for room, under the limit or on the mount."""
        self._retired = 0

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
        if lend and place == Tier.MEMORY and self.spares.fits(nbytes):
            self._spare_candidates[target] = nbytes
        return Removal(source, target, place)

    def reaped(self, target: str) -> None:
        """Forget a zombie that no process maps and that was deleted."""
        place, nbytes = self._zombies.pop(target)
        self._spare_candidates.pop(target, None)
        self.used[place] -= nbytes
        self.zombie_bytes -= nbytes

    # ---- spares

    def keep(self, target: str, now: float) -> bool:
        """Turn a zombie that no process maps into a spare. If this returns False, delete the file and call `reaped`."""
        if target not in self._spare_candidates:
            return False
        _, held = self._zombies.pop(target)
        self.zombie_bytes -= held
        self.spare_bytes += held
        self.spares.add(target, self._spare_candidates.pop(target), now)
        return True

    def surplus(self, now: float) -> list[str]:
        """Give up spares that have been idle too long or exceed a limit. The caller deletes them and calls `reaped`."""
        return [self.give_up_spare(name) for name in self.spares.surplus(now)]

    def give_up_spares(self) -> list[str]:
        """Give up all spares, because a full mount may need their pages."""
        return [self.give_up_spare(name) for name in self.spares.all_but(None)]

    def give_up_spare(self, name: str) -> str:
        """Turn a spare into a zombie, to be deleted and then `reaped`, and return its name."""
        held = self._take_spare(name)
        self._zombies[name] = (Tier.MEMORY, held)
        self.zombie_bytes += held
        return name

    def _take_spare(self, name: str) -> int:
        """Remove a spare and return the size of its pages in bytes."""
        held = held_bytes(self.spares.take(name))
        self.spare_bytes -= held
        return held

    def missing_bytes(self, nbytes: int, spare: str | None) -> int:
        """Return the number of bytes by which a put that takes this spare would exceed the memory limit."""
        freed = held_bytes(self.spares.size(spare)) if spare is not None else 0
        return self.used[Tier.MEMORY] - freed + held_bytes(nbytes) - self.limits[Tier.MEMORY]

    def free_spares(self, nbytes: int, spare: str | None) -> list[str]:
        """Give up as many other spares, longest idle first, as a put that takes `spare` needs."""
        missing = self.missing_bytes(nbytes, spare)
        names: list[str] = []
        for name in self.spares.all_but(spare) if missing > 0 else ():
            if missing <= 0:
                break
            missing -= held_bytes(self.spares.size(name))
            names.append(self.give_up_spare(name))
        return names
