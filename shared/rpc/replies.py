"""Keeps answers for retries. An answer is never sent to a different role or for a different request."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from proto.tensors import Buffer
from shared.security.roles import Role

CACHED_REPLIES = 16384
CACHED_REPLY_BYTES = 32 << 20
GRACE_S = 5.0
"""Seconds after the caller's deadline for which an answer is kept."""
SETTLED_S = 60.0
"""Seconds after which an answer is settled: a caller that misses it repeats its request every few seconds, unless the
caller is stopped or cut off."""
SETTLED_REPLIES = 256
"""Number of answers to one role above which settled ones are dropped."""
SETTLED_BYTES = 1 << 20
"""Bytes of the answers to one role above which settled ones are dropped. Without this limit, a process whose calls have
a deadline of an hour would keep the answers of an hour."""


class RequestKey(NamedTuple):
    """Identifies a request: the role of its sender and the two numbers in its envelope."""

    role: Role
    incarnation: int
    request_id: int


def fingerprint(kind: int, parts: Sequence[Buffer]) -> int:
    """Return a digest of the type, body and tensor table of a request (the table has checksums of the tensors).

    A retry has the same fingerprint; only the remaining time in its envelope differs.
    """
    digest = xxhash.xxh3_64_intdigest(parts[1], kind)
    return digest if len(parts) == 2 else digest ^ xxhash.xxh3_64_intdigest(parts[2], kind + 1)


class _Kept(NamedTuple):
    request: int
    frames: list[Buffer]
    since: float


class Replies:
    """The most recent answers to one role, bounded in number and bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._kept: OrderedDict[RequestKey, _Kept] = OrderedDict()
        self._ends: list[tuple[float, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: RequestKey) -> tuple[int, list[Buffer]] | None:
        """Return `(fingerprint of the request, frames of the answer)`, or None if no answer is kept."""
        kept = self._kept.get(key)
        return None if kept is None else (kept.request, kept.frames)

    def keep(self, key: RequestKey, request: int, frames: list[Buffer], *, now: float, deadline: float) -> None:
        """Keep an answer for as long as its caller may retry. The oldest answers are dropped if there are too many."""
        while self._ends and self._ends[0][0] <= now:
            self._forget(heapq.heappop(self._ends)[1])
        self._kept[key] = _Kept(request, frames, now)
        self.nbytes += sum(map(len, frames))
        heapq.heappush(self._ends, (deadline + GRACE_S, key))
        while self._is_full(now):
            self._forget(next(iter(self._kept)))
        if len(self._ends) > 2 * len(self._kept) + SETTLED_REPLIES:  # drop the deadlines of answers that are gone
            self._ends = [end for end in self._ends if end[1] in self._kept]
            heapq.heapify(self._ends)

    def _is_full(self, now: float) -> bool:
        """Return whether the oldest answer must be dropped."""
        if len(self._kept) > CACHED_REPLIES or self.nbytes > CACHED_REPLY_BYTES:
            return True
        if len(self._kept) <= SETTLED_REPLIES and self.nbytes <= SETTLED_BYTES:
            return False
        return next(iter(self._kept.values())).since < now - SETTLED_S

    def _forget(self, key: RequestKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.nbytes -= sum(map(len, kept.frames))
