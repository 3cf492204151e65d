"""Keeps a compute thread busy with leases: while some are being computed, the next is prepared
and earlier ones are finished.

At most one lease is held in advance. Errors while finishing a block are reported, and a computation that hangs ends the
service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from proto.messages import ErrorCode
from shared.lease import BACKOFF_S, Lease, LeaseBook, LeaseLost, Retired
from shared.rpc.errors import RpcError

FINISHING_BLOCKS = 2
DRAIN_FINISH_S = 4.0
STOP_S = 4.0
"""Maximum time, in seconds, that a cancelled computation may take to end."""
PREPARE_S = 30.0
PREPARE_ATTEMPTS = 4
"""Seconds and number of attempts after which repeated failures to prepare leases with the same weights are fatal."""
P = TypeVar("P")
C = TypeVar("C")


class _PreparationFailures:
    """Counts consecutive failed preparations."""

    def __init__(self) -> None:
        self._of = ("", 0)
        self._times = 0
        self._since = 0.0

    def count(self, lease: Lease, error: RpcError) -> None:
        """Count a failure. Raises RpcError(internal) once `PREPARE_S` and `PREPARE_ATTEMPTS` are both reached.

        Failed preparations do not count as attempts at their tasks. Without a limit, the run would stall.
        """
        weights, now = lease.grant.weights, time.monotonic()
        of = (weights.task_id, weights.fence) if weights is not None else ("", 0)
        if not self._times or of != self._of:
            self._of, self._times, self._since = of, 0, now
        self._times += 1
        if self._times < PREPARE_ATTEMPTS or now - self._since < PREPARE_S:
            return
        what, remedy = "", ""
        if weights is not None:
            what = f" with version {weights.step} of lineage {weights.lineage} ({weights.task_id} in {weights.store})"
            remedy = (
                "; if its weights are lost or damaged there, end the run and --resume it, which publishes them again"
            )
        raise RpcError(
            ErrorCode.INTERNAL,
            f"no lease{what} could be prepared in {now - self._since:.0f} s and {self._times} attempts "
            f"(limits {PREPARE_S:g} s, {PREPARE_ATTEMPTS}); the last error: {error}{remedy}",
        )


class LeasePipeline(Generic[P, C]):
    """A pipeline on the service's loop. If a peer refuses to prepare or finish a lease, the lease is handed back.

    `acquire` waits for a lease, `prepare` makes it ready to compute, `compute` computes it and `finish` completes it.
    `compute` returns only when the compute thread is free again, and returns None if it has ended the lease itself. A
    LeaseLost from any of them drops the block. RpcError from `compute`, bad_request from `prepare` and repeated
    failures to prepare end the service.
    """

    def __init__(
        self,
        book: LeaseBook,
        *,
        acquire: Callable[[], Awaitable[Lease]],
        prepare: Callable[[Lease], Awaitable[P]],
        compute: Callable[[Lease, P], Awaitable[C | None]],
        finish: Callable[[Lease, P, C], Awaitable[None]],
        side_by_side: int = 1,
        may_lease: asyncio.Event | None = None,
    ) -> None:
        """`side_by_side` is the number of leases computed at a time. Leases are acquired only while `may_lease` is set
        (None: always)."""
        self._book = book
        self._acquire = acquire
        self._prepare = prepare
        self._compute = compute
        self._finish = finish
        self._side_by_side = side_by_side
        self._may_lease = may_lease
        self._computing: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled, or until the last lease is finished once the book is retired.

        When it is cancelled, blocks that are being finished continue until `drain`.
        """
        ahead = asyncio.create_task(self._next_prepared())
        try:
            while True:
                while not ahead.done() or len(self._computing) >= self._side_by_side:
                    waiting = {*self._computing, *self._finishing, *(() if ahead.done() else (ahead,))}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    self._reap()
                try:
                    lease, prepared = ahead.result()
                except Retired:
                    while busy := {*self._computing, *self._finishing}:
                        await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
                        self._reap()
                    return
                self._book.queued.discard(lease)
                lease.untouched = False
                ahead = asyncio.create_task(self._next_prepared())
                self._computing.add(asyncio.create_task(self._compute_one(lease, prepared)))
        finally:
            for task in (ahead, *self._computing):
                task.cancel()
            await asyncio.gather(ahead, *self._computing, return_exceptions=True)

    async def drain(self) -> None:
        """Finish computed blocks within DRAIN_FINISH_S, then hand back all other leases.

        Leases that were not computed are handed back as untouched: stopping the service does not count as an
        attempt at their tasks.
        """
        if self._finishing:
            _, late = await asyncio.wait(self._finishing, timeout=DRAIN_FINISH_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        back = (
            self._book.hand_back(lease, "draining", untouched=lease.untouched or not lease.is_computed)
            for lease in self._book.held
        )
        await asyncio.gather(*back)

    async def _next_prepared(self) -> tuple[Lease, P]:
        refused = _PreparationFailures()
        while True:
            lease = await self._next_lease()
            try:
                prepared = await self._prepare(lease)
            except LeaseLost as error:
                self._book.forget(lease, str(error))
            except RpcError as error:
                if error.code == ErrorCode.BAD_REQUEST:
                    raise
                # Missing data, most often the weights of a version, does not reappear at once.
                await self._book.hand_back(lease, f"not prepared: {error}", untouched=True)
                refused.count(lease, error)
                await asyncio.sleep(BACKOFF_S)
            else:
                self._book.queued.add(lease)  # it is queued until there is room to compute it
                lease.untouched = True
                return lease, prepared

    async def _next_lease(self) -> Lease:
        """Return the next lease. A lease that is granted after `may_lease` was cleared is handed back."""
        while self._may_lease is not None:
            await self._allowed(self._may_lease)
            lease = await self._acquire()
            if self._may_lease.is_set():
                return lease
            await self._book.hand_back(
                lease, "finished blocks are waiting, so this one would have to wait, too", untouched=True
            )
        return await self._acquire()

    async def _allowed(self, may_lease: asyncio.Event) -> None:
        """Wait until leases may be acquired or the book is retired. `acquire` reports a retired book."""
        either = {asyncio.create_task(may_lease.wait()), asyncio.create_task(self._book.retired.wait())}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in either:
                each.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def _compute_one(self, lease: Lease, prepared: P) -> None:
        try:
            lease.check()
            computed = await self._result_of(lease, prepared)
        except LeaseLost as error:
            self._book.forget(lease, str(error))
            return
        if computed is None:
            return
        lease.computed()
        self._book.queued.add(lease)
        try:
            while len(self._finishing) >= FINISHING_BLOCKS:
                await asyncio.wait(self._finishing, return_when=asyncio.FIRST_COMPLETED)
                self._reap()
        finally:
            self._book.queued.discard(lease)
        self._finishing.add(asyncio.create_task(self._end(lease, prepared, computed)))

    async def _result_of(self, lease: Lease, prepared: P) -> C | None:
        """Return the result of `compute`. Raises RpcError(internal) if `compute` does not return within `lease_s` after
        its lease was lost: the compute thread hangs and can serve no further lease.
        """
        computing: asyncio.Future[C | None] = asyncio.ensure_future(self._compute(lease, prepared))
        given_up = asyncio.ensure_future(lease.given_up.wait())
        either: set[asyncio.Future[Any]] = {computing, given_up}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            while not computing.done():
                before, lease_s = self._book.computing(), lease.grant.lease_s
                await asyncio.wait({computing}, timeout=lease_s)
                if not computing.done() and self._book.computing() == before and not self._book.blocked_on_devices():
                    raise RpcError(
                        ErrorCode.INTERNAL,
                        f"lease {lease.grant.lease_id} was lost, and {lease_s:g} s later (lease.lease_s) its "
                        "computation has neither stopped nor advanced: it is hanging, so this process exits and is "
                        "restarted",
                    )
            return computing.result()
        finally:
            for each in either:
                each.cancel()
            # The timeout lets the process end even if a computation hangs.
            await asyncio.wait({asyncio.gather(*either, return_exceptions=True)}, timeout=STOP_S)

    async def _end(self, lease: Lease, prepared: P, computed: C) -> None:
        try:
            lease.check()
            await self._finish(lease, prepared, computed)
        except LeaseLost as error:
            self._book.forget(lease, str(error))
        except RpcError as error:
            await self._book.hand_back(lease, f"not finished: {error}")

    def _reap(self) -> None:
        for tasks in (self._computing, self._finishing):
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
