"""A process's turns on the devices it computes on: waits until it may load something, gives up what others wait for.
Must never let anything be loaded that was not granted, nor take off what is being worked with.

`SharedDevices` asks the scheduler (`HoldDevices`); `OwnDevices` is for a process that shares with nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from proto.messages import DeviceOrder, ErrorCode, HoldDevices
from shared.actor.service import Service
from shared.devices import Holding, Parts
from shared.rpc.errors import RpcError

POLL_S = 20.0
BACKOFF_S = 0.05
_AGAIN = (ErrorCode.DEADLINE, ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.NOT_READY, ErrorCode.LOST)
"""Answers after which the same report is sent again: nothing to do, the scheduler restarts, not registered yet."""


class Turns(Protocol):
    """Belongs to the service's loop. One turn at a time."""

    @property
    def waiting(self) -> bool:
        """Whether a turn is being waited for."""

    async def acquire(self, parts: Parts) -> None:
        """Wait until `parts`, and what is in use already, may lie on the devices; they are in use from then on."""

    def done(self) -> None:
        """Nothing is in use any more. It may stay where it is until somebody else wants the room. Whoever waits in
        `acquire` goes on waiting."""


class OwnDevices:
    """Everything may lie there at all times."""

    waiting = False

    async def acquire(self, parts: Parts) -> None:
        """At once."""

    def done(self) -> None:
        """Nothing to tell anybody."""


class SharedDevices:
    """The turns of one process; `run` must run for them to come."""

    def __init__(self, service: Service, leave: Callable[[Parts], Awaitable[Parts]]) -> None:
        """`leave` takes parts off the devices and returns all that went with them; called only between turns."""
        self._service = service
        self._leave = leave
        self._own = Holding()
        self._changed = asyncio.Event()
        self._granted = asyncio.Event()

    @property
    def waiting(self) -> bool:
        return bool(self._own.wants)

    async def acquire(self, parts: Parts) -> None:
        if self._own.want(parts | self._own.using):
            return
        self._changed.set()
        try:
            while not parts <= self._own.using:
                self._granted.clear()
                await self._granted.wait()
        except asyncio.CancelledError:
            self._rest()
            raise

    def done(self) -> None:
        if not self.waiting:
            self._rest()

    def _rest(self) -> None:
        before = self._own.number
        self._own.done()
        if self._own.number != before:
            self._changed.set()

    async def run(self) -> None:
        """Report, obey, until cancelled. Raises RpcError when the scheduler refuses what this process says."""
        while True:
            self._changed.clear()
            report = self._report()  # now: a task begins later, when it may say more than its number stands for
            asking = asyncio.create_task(self._ask(report))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({asking, changed}, return_when=asyncio.FIRST_COMPLETED)
                order = asking.result() if asking.done() else None
            finally:
                for each in (asking, changed):
                    each.cancel()
                await asyncio.gather(asking, changed, return_exceptions=True)
            if order is None:
                continue
            leaving = self._own.obey(report.number, frozenset(order.parts), granted=order.granted)
            self._granted.set()
            if leaving:
                self._own.left(await self._leave(leaving))

    def _report(self) -> HoldDevices:
        return HoldDevices(
            service=self._service.NAME,
            instance=self._service.instance,
            incarnation=self._service.incarnation,
            number=self._own.number,
            holds=sorted(self._own.holds),
            using=sorted(self._own.using),
            wants=sorted(self._own.wants),
        )

    async def _ask(self, report: HoldDevices) -> DeviceOrder:
        while True:
            try:
                return await self._service.scheduler.call(report, DeviceOrder, deadline_s=POLL_S)
            except RpcError as error:
                if error.code not in _AGAIN:
                    raise
                await asyncio.sleep(max(error.retry_after_s, BACKOFF_S))  # paces the retries, nothing waits on it


def take_turns(service: Service, leave: Callable[[Parts], Awaitable[Parts]]) -> SharedDevices:
    """The turns of `service` from now to its end.

    Raises RpcError(bad_request) for a process that no supervisor started: nobody could kill it if it hung with others'
    memory, and nobody would know when its own is free.
    """
    if not service.supervised:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"{service.name}: takes turns on shared devices (placement.colocate), where who hangs must be killed: only "
            f"a launcher may start it; use `python -m launch.ctl --run {service.run.path} restart {service.name}`",
        )
    turns = SharedDevices(service, leave)
    service.keep(turns.run())
    return turns
