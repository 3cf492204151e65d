"""Keeps a compute thread busy with leases: while some are computed the next is leased and prepared, and those
before them are finished. Must never hold more than one lease ahead, let a finished block's error pass in silence, nor
wait for ever for a computation that hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from proto.messages import ErrorCode
from shared.lease import BACKOFF_S, Lease, LeaseBook, LeaseLost
from shared.rpc.errors import RpcError

FINISHING_BLOCKS = 2
DRAIN_FINISH_S = 4.0
STOP_S = 4.0
"""For a computation to end that is cancelled."""
PREPARE_S = 30.0
PREPARE_ATTEMPTS = 4
"""So long, and so often, one lease after the other may be refused its preparation, all with the same weights."""
P = TypeVar("P")
C = TypeVar("C")


class _Refused:
    """Preparations that failed in a row."""

    def __init__(self) -> None:
        self._of = ("", 0)
        self._times = 0
        self._since = 0.0

    def count(self, lease: Lease, error: RpcError) -> None:
        """Raises RpcError(internal) when there is no hope left that the next lease of the same version can be prepared:
        nothing of it counts as an attempt, so that the run would stand for ever.
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
                "; if its weights are lost or damaged there: end the run and --resume it, which publishes them again"
            )
        raise RpcError(
            ErrorCode.INTERNAL,
            f"no lease{what} could be prepared in {now - self._since:.0f} s and {self._times} attempts "
            f"(limits {PREPARE_S:g} s, {PREPARE_ATTEMPTS}), the last: {error}{remedy}",
        )


class LeasePipeline(Generic[P, C]):
    """Belongs to the service's loop. A lease whose preparation or finish a peer refuses goes back.

    `acquire` waits for a lease; `prepare` makes it ready to compute; `compute` returns None when it has ended the
    lease itself, and not before the compute thread is free again; `finish` completes it. LeaseLost from any of them
    forgets the block. RpcError from `compute` and bad_request from `prepare` end the service, and so does a preparation
    that fails again and again.
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
        """`side_by_side`: leases that may be computed at a time. `may_lease`: nothing new is leased while it is not
        set (None: always)."""
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
        """Work until cancelled; blocks that are being finished then go on until `drain`."""
        ahead = asyncio.create_task(self._next())
        try:
            while True:
                while not ahead.done() or len(self._computing) >= self._side_by_side:
                    waiting = {*self._computing, *self._finishing, *(() if ahead.done() else (ahead,))}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    self._reap()
                lease, prepared = ahead.result()
                self._book.behind.discard(lease)
                lease.untouched = False
                ahead = asyncio.create_task(self._next())
                self._computing.add(asyncio.create_task(self._compute_one(lease, prepared)))
        finally:
            for task in (ahead, *self._computing):
                task.cancel()
            await asyncio.gather(ahead, *self._computing, return_exceptions=True)

    async def drain(self) -> None:
        """What is computed is finished if that is quick; every other lease goes back at once, and it is no attempt of
        tasks that were not computed: whoever ends this service does not end it for them."""
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

    async def _next(self) -> tuple[Lease, P]:
        refused = _Refused()
        while True:
            lease = await self._leased()
            try:
                prepared = await self._prepare(lease)
            except LeaseLost as error:
                self._book.forget(lease, str(error))
            except RpcError as error:
                if error.code == ErrorCode.BAD_REQUEST:
                    raise
                # What it lacks (the weights of a version, most often) is not there again at once.
                await self._book.hand_back(lease, f"not prepared: {error}", untouched=True)
                refused.count(lease, error)
                await asyncio.sleep(BACKOFF_S)
            else:
                self._book.behind.add(lease)  # until there is room among those that are computed
                lease.untouched = True
                return lease, prepared

    async def _leased(self) -> Lease:
        """The next lease. The scheduler may have held the request back until nothing was to be leased any more."""
        while self._may_lease is not None:
            await self._may_lease.wait()
            lease = await self._acquire()
            if self._may_lease.is_set():
                return lease
            await self._book.hand_back(lease, "finished blocks wait, and so would this one", untouched=True)
        return await self._acquire()

    async def _compute_one(self, lease: Lease, prepared: P) -> None:
        try:
            lease.check()
            computed = await self._computed(lease, prepared)
        except LeaseLost as error:
            self._book.forget(lease, str(error))
            return
        if computed is None:
            return
        lease.computed()
        self._book.behind.add(lease)
        try:
            while len(self._finishing) >= FINISHING_BLOCKS:
                await asyncio.wait(self._finishing, return_when=asyncio.FIRST_COMPLETED)
                self._reap()
        finally:
            self._book.behind.discard(lease)
        self._finishing.add(asyncio.create_task(self._end(lease, prepared, computed)))

    async def _computed(self, lease: Lease, prepared: P) -> C | None:
        """What `compute` returns. Raises RpcError(internal) when it has stood still for `lease_s` after its lease was
        lost: no lease would get anything from this compute thread any more.
        """
        computing: asyncio.Future[C | None] = asyncio.ensure_future(self._compute(lease, prepared))
        given_up = asyncio.ensure_future(lease.given_up.wait())
        either: set[asyncio.Future[Any]] = {computing, given_up}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            while not computing.done():
                before, lease_s = self._book.computing(), lease.grant.lease_s
                await asyncio.wait({computing}, timeout=lease_s)
                if not computing.done() and self._book.computing() == before and not self._book.stands():
                    raise RpcError(
                        ErrorCode.INTERNAL,
                        f"lease {lease.grant.lease_id} was lost, and {lease_s:g} s later (lease.lease_s) its "
                        "computation has neither stopped nor moved: it hangs, this process ends and is started again",
                    )
            return computing.result()
        finally:
            for each in either:
                each.cancel()
            # Bounded: what hangs must not keep the process from its end.
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
