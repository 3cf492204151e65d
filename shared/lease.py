"""The worker's side of leases: acquiring them, renewing them by making progress, completing them, and handing them
back.

Calls to a scheduler or store that is unavailable are repeated while the lease is held, each with a time limit. A call
within its limit renews the lease, however short `lease_s` is. A call that exceeds its limit no longer renews the lease.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from proto.messages import Complete, CompleteAck, ErrorCode, LeaseGrant, LeaseProgress, LeaseRequest, TaskResult
from proto.tensors import Array
from shared.actor.service import CALL_S, Service
from shared.dataplane.stream import OnProgress
from shared.rpc.errors import AWAY, RpcError

POLL_S = 20.0
BACKOFF_S = 0.25
HAND_BACK_S = 2.0
T = TypeVar("T")


class LeaseLost(Exception):
    """The lease is no longer held, and its work must be dropped."""


class Lease:
    """A held lease. `cancel` is set when its work must stop, and may be read from any thread; code on the loop may wait
    for `given_up`.

    Until `computed` is called, the lease counts as progressing whenever the compute thread does, even if that thread is
    busy with an earlier lease. Afterwards only `advance` counts, so a lease that is stuck after its computation is lost
    even while other leases are being computed.
    """

    def __init__(self, grant: LeaseGrant, computing: Callable[[], int]) -> None:
        self.grant = grant
        self.granted_at = time.monotonic()
        self.cancel = threading.Event()
        self.given_up = asyncio.Event()
        self.untouched = False
        """True as long as the work has not begun. If the lease ends in this state, its tasks are not to blame."""
        self._computing = computing
        self._computed: int | None = None
        self._advanced = 0
        self._waits_until = 0.0

    @property
    def progress(self) -> int:
        return self._advanced + (self._computing() if self._computed is None else self._computed)

    @property
    def is_computed(self) -> bool:
        return self._computed is not None

    def computed(self) -> None:
        """Record that the compute thread is done with this lease."""
        if self._computed is None:
            self._computed = self._computing()

    def advance(self) -> None:
        """Record progress outside the compute thread."""
        self._advanced += 1

    @property
    def waits(self) -> bool:
        """Whether the lease is waiting for a peer whose time limit has not passed."""
        return time.monotonic() < self._waits_until

    def wait(self, limit_s: float) -> None:
        """Record that the lease is waiting for a peer, for up to `limit_s` seconds from now. A limit of 0 ends the
        wait."""
        self._waits_until = time.monotonic() + limit_s

    async def within(self, limit_s: float, work: Awaitable[T]) -> T:
        """Return the result of `work`.

        While it runs, renew the lease for up to `limit_s` seconds; `work` may take longer.
        """
        self.wait(limit_s)
        try:
            return await work
        finally:
            self.wait(0.0)
            self.advance()

    def give_up(self) -> None:
        """Tell the work to stop. Call it on the loop's thread."""
        self.cancel.set()
        self.given_up.set()

    async def while_held(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the lease is given up first, cancel `work` and raise LeaseLost."""
        task = asyncio.create_task(work)
        given_up = asyncio.create_task(self.given_up.wait())
        either: set[asyncio.Task[Any]] = {task, given_up}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return task.result()
        finally:
            for each in either:
                each.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    def check(self) -> None:
        """Raise LeaseLost if the work must stop."""
        if self.cancel.is_set():
            raise LeaseLost(f"lease {self.grant.lease_id} is no longer held")


class Retired(Exception):
    """No further lease is acquired, because the service ends once the leases that it holds are finished."""


class LeaseBook:
    """The leases that a service holds for one stage. It belongs to the service's loop."""

    def __init__(self, service: Service, stage: str, computing: Callable[[], int]) -> None:
        """`computing` returns the progress counter of the compute thread, which only that thread advances."""
        self.blocked_on_devices: Callable[[], bool] = lambda: False
        """Returns whether computation is blocked by processes that hold the devices. Turns have their own limits."""
        self.queued: set[Lease] = set()
        """Leases that wait for other leases to end. They count as progressing whenever one of the other leases does."""
        self.retired = asyncio.Event()
        """Event that is set once no further lease may be acquired."""
        self._others = 0
        self.computing = computing
        self._service = service
        self._stage = stage
        self._held: dict[int, Lease] = {}

    @property
    def held(self) -> list[Lease]:
        return list(self._held.values())

    @property
    def uncomputed(self) -> list[Lease]:
        """Leases that the compute thread has not finished."""
        return [lease for lease in self._held.values() if not lease.is_computed]

    def progress(self) -> list[LeaseProgress]:
        """Return the progress of all leases, for the heartbeat."""
        for lease in self._held.values():
            if lease.waits:
                lease.advance()
        if self.blocked_on_devices():
            for lease in self.uncomputed:
                lease.advance()
        others = sum(lease.progress for lease in self._held.values() if lease not in self.queued)
        if others != self._others:
            for lease in self.queued:
                lease.advance()
        self._others = others
        return [LeaseProgress(number, lease.progress, lease.untouched) for number, lease in self._held.items()]

    def lost(self, lease_ids: Sequence[int]) -> None:
        """Give up these leases, which the scheduler has withdrawn."""
        for lease_id in lease_ids:
            lease = self._held.pop(lease_id, None)
            if lease is not None:
                lease.give_up()
                self._service.log.warning("lease lost", lease_id=lease_id, stage=self._stage)

    def forget(self, lease: Lease, why: str) -> None:
        """Drop a lease that is no longer held."""
        lease.give_up()
        self._held.pop(lease.grant.lease_id, None)
        self._service.log.warning("block dropped", lease_id=lease.grant.lease_id, why=why)

    async def acquire(self, max_tasks: int, holds: Callable[[], tuple[int, int]] = lambda: (0, -1)) -> Lease:
        """Wait until there is work, and return its lease. `holds` returns the (lineage, step) of the engine's weights.

        Raises only Retired and RpcError(bad_request); after any other error the request is repeated. If the book is
        retired during a request, this still waits for the answer, because otherwise no process would hold the granted
        lease.
        """
        asked_at = time.monotonic()
        while True:
            if self.retired.is_set():
                raise Retired
            lineage, step = holds()
            request = LeaseRequest(
                stage=self._stage,
                service=self._service.NAME,
                instance=self._service.instance,
                incarnation=self._service.incarnation,
                max_tasks=max_tasks,
                holds_lineage=lineage,
                holds_step=step,
            )
            try:
                grant = await self._service.scheduler.call(request, LeaseGrant, deadline_s=POLL_S)
            except RpcError as error:
                if error.code == ErrorCode.BAD_REQUEST:
                    raise
                if error.code not in (ErrorCode.NOT_READY, ErrorCode.DEADLINE):
                    self._service.log.info("no lease", code=error.code, error=str(error))
                    await asyncio.sleep(max(error.retry_after_s, BACKOFF_S))
                continue
            lease = Lease(grant, self.computing)
            self._held[grant.lease_id] = lease
            self._service.telemetry.span("lease", time.monotonic() - asked_at, of="scheduler/0")
            return lease

    async def persist(
        self, lease: Lease, what: str, attempt: Callable[[OnProgress], Coroutine[Any, Any, T]], limit_s: float
    ) -> T:
        """Repeat `attempt` while its peer is unavailable and the lease is held, and return its result.

        An attempt renews the lease for `limit_s` seconds, within which it should complete; each call to its
        `OnProgress` restarts that time. Raises LeaseLost as soon as the lease is lost, and any RpcError that a retry
        cannot fix.
        """
        with self.part(lease, what):
            return await lease.while_held(lease.within(limit_s, self._repeat(lease, what, attempt, limit_s)))

    @contextmanager
    def part(self, lease: Lease, what: str) -> Iterator[None]:
        """Report the body of the `with` statement as part of the life of a lease's traced tasks, if it ends without an
        exception."""
        began = time.monotonic()
        yield
        self._report(lease, what, began)

    def about(self, lease: Lease) -> dict[str, float | str]:
        """Return the lease and its traced tasks as span values, or an empty dict if none of its tasks is traced."""
        tasks = self._service.telemetry.traced(task.task_id for task in lease.grant.batch.tasks)
        return {"tasks": tasks, "lease": float(lease.grant.lease_id), "stage": self._stage} if tasks else {}

    def _report(self, lease: Lease, what: str, since: float) -> None:
        """Report a part of the life of a lease's traced tasks, from the monotonic time `since` until now."""
        if about := self.about(lease):
            self._service.telemetry.part(what, time.monotonic() - since, about)

    async def _repeat(
        self, lease: Lease, what: str, attempt: Callable[[OnProgress], Awaitable[T]], limit_s: float
    ) -> T:
        def on_progress() -> None:
            lease.wait(limit_s)

        while True:
            lease.check()
            on_progress()
            try:
                return await attempt(on_progress)
            except RpcError as error:
                if error.code not in AWAY:
                    raise
                self._service.log.warning(f"{what}: trying again", code=error.code, error=str(error))
                await asyncio.sleep(max(error.retry_after_s, BACKOFF_S))

    async def complete(
        self, lease: Lease, results: Sequence[TaskResult], scalars: Mapping[str, Array] | None = None
    ) -> None:
        """End the lease with `results`. The lease's other tasks go back to the scheduler. Raises LeaseLost."""
        request = self._request(lease, results, scalars or {})
        try:
            # The call continues even if the lease is given up: a heartbeat may report the lease's end before the answer
            # arrives.
            call = partial(self._service.scheduler.call, request, CompleteAck, deadline_s=CALL_S)
            ack = await lease.within(CALL_S, self._repeat(lease, "complete", lambda _: call(), CALL_S))
        except RpcError as error:
            if error.code != ErrorCode.LOST:
                raise
            raise LeaseLost(str(error)) from None
        finally:
            self._held.pop(lease.grant.lease_id, None)
        self._report(lease, "lease", lease.granted_at)
        for refusal in ack.refused:
            self._service.log.warning("result refused", task_id=refusal.task_id, code=refusal.code, why=refusal.message)

    async def hand_back(self, lease: Lease, why: str, *, untouched: bool = False) -> None:
        """End the lease without results. The request is sent once, with a deadline; if it fails, the lease expires.

        `untouched` means that the lease was not worked on, so its tasks are not to blame.
        """
        lease.give_up()
        if self._held.pop(lease.grant.lease_id, None) is None:
            return
        self._service.log.info("lease handed back", lease_id=lease.grant.lease_id, why=why)
        try:
            request = msgspec.structs.replace(self._request(lease, [], {}), untouched=untouched)
            await self._service.scheduler.call(request, CompleteAck, deadline_s=HAND_BACK_S)
        except RpcError as error:
            self._service.log.warning("lease not handed back", lease_id=lease.grant.lease_id, error=str(error))

    def _request(self, lease: Lease, results: Sequence[TaskResult], scalars: Mapping[str, Array]) -> Complete:
        return Complete(
            lease_id=lease.grant.lease_id,
            stage=self._stage,
            incarnation=self._service.incarnation,
            results=list(results),
            scalars=dict(scalars),
        )
