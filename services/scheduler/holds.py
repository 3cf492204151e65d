"""The shards that a server holds: those of its clients' data and of their models' versions, which belong to no task of
the scheduler. The module is pure.

A hold covers consecutive tasks of one model. Reconciliation leaves their shards alone until the hold is released.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from proto.ids import check_task_id, make_task_id, split_task_id
from proto.messages import ErrorCode, HoldShards, PutTask, ReleaseShards
from shared.rpc.errors import RpcError
from shared.stages import API, WEIGHTS

MOST_TASKS = 1 << 16
"""Maximum number of tasks of one hold."""
SPLITS = (API, WEIGHTS)


class Holds:
    """The ranges that are held, by split and epoch."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], dict[int, int]] = {}
        """For each range, its first index and the number of its tasks."""
        self._firsts: dict[tuple[str, int], list[int]] = {}
        """The first indices in order."""

    def saved(self) -> list[tuple[str, int, int, int]]:
        """Return all ranges as (split, epoch, first, count), in the order in which their models came."""
        return [
            (*place, first, self._counts[place][first]) for place, firsts in self._firsts.items() for first in firsts
        ]

    def restore(self, saved: list[tuple[str, int, int, int]]) -> None:
        for split, epoch, first, count in saved:
            self._add((split, epoch), first, count)

    def covers(self, task_id: str) -> bool:
        """Return whether the shards of this task are held."""
        if not self._firsts:
            return False
        split, epoch, index = split_task_id(task_id)
        firsts = self._firsts.get((split, epoch), [])
        at = bisect_right(firsts, index)
        return at > 0 and index < firsts[at - 1] + self._counts[split, epoch][firsts[at - 1]]

    def hold(self, request: HoldShards) -> bool:
        """Add a range. Return False if it is held already. Raises RpcError(bad_request)."""
        split, epoch, first, count = request.split, request.epoch, request.first, request.count
        if split not in SPLITS or not 1 <= count <= MOST_TASKS or epoch < 0 or first < 0:
            what = f"hold of {count} tasks of {split[:80]!r} from {epoch}/{first}"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{what}: use {' or '.join(SPLITS)}, and 1 to {MOST_TASKS} tasks")
        check_task_id(make_task_id(split, epoch, first + count - 1))
        if self._counts.get((split, epoch), {}).get(first) == count:
            return False
        if self._overlaps((split, epoch), first, count):
            raise self._refused("hold", request)
        self._add((split, epoch), first, count)
        return True

    def release(self, request: ReleaseShards) -> list[PutTask]:
        """Remove a range, and return its tasks. Return none if it is not held. Raises RpcError(bad_request)."""
        place, first, count = (request.split, request.epoch), request.first, request.count
        if not 0 <= request.fence < 1 << 32:
            raise RpcError(ErrorCode.BAD_REQUEST, f"release under fence {request.fence}: it is out of range")
        if self._counts.get(place, {}).get(first) != count:
            if self._overlaps(place, first, count):
                raise self._refused("release", request)
            return []
        del self._counts[place][first]
        self._firsts[place].remove(first)
        if not self._firsts[place]:
            del self._counts[place], self._firsts[place]
        return [PutTask(make_task_id(*place, index), request.fence) for index in range(first, first + count)]

    def _add(self, place: tuple[str, int], first: int, count: int) -> None:
        self._counts.setdefault(place, {})[first] = count
        insort(self._firsts.setdefault(place, []), first)

    def _overlaps(self, place: tuple[str, int], first: int, count: int) -> bool:
        firsts = self._firsts.get(place, [])
        at = bisect_right(firsts, first)
        before = at > 0 and first < firsts[at - 1] + self._counts[place][firsts[at - 1]]
        return before or (at < len(firsts) and firsts[at] < first + count)

    @staticmethod
    def _refused(what: str, request: HoldShards | ReleaseShards) -> RpcError:
        last = request.first + request.count - 1
        text = f"{what} of {make_task_id(request.split, request.epoch, request.first)} to {last}"
        return RpcError(ErrorCode.BAD_REQUEST, f"{text}: it overlaps with another range; use the ranges of the holds")
