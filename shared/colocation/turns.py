"""A process's turns on its devices: it waits until it may load parts, and releases parts that other processes need.

Only granted parts are loaded, and parts in use stay on the devices. `SharedDevices` asks the scheduler (`HoldDevices`);
`OwnDevices` is for a process with devices of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from proto.messages import DeviceOrder, ErrorCode, HoldDevices
from shared.actor.service import Service
from shared.colocation.devices import Holding, Parts
from shared.rpc.errors import BadInput, RpcError

POLL_S = 20.0
BACKOFF_S = 0.05
_AGAIN = (ErrorCode.DEADLINE, ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.NOT_READY, ErrorCode.LOST)
"""Error codes after which the report is sent again: there is no order yet, or the scheduler is restarting or does not
know the process."""


class Turns(Protocol):
    """Turns on devices, one at a time. This object belongs to the service's loop."""

    @property
    def waiting(self) -> bool:
        """Whether the process is waiting for a turn."""

    async def acquire(self, parts: Parts) -> None:
        """Wait until `parts`, and those already in use, may be on the devices. They are in use from then on."""

    def done(self) -> None:
        """End the turn. Parts may stay on the devices until another process needs the space. A pending `acquire`
        continues to wait."""


class OwnDevices:
    """Turns on devices that are not shared: all parts may be there at any time."""

    waiting = False

    async def acquire(self, parts: Parts) -> None:
        """Return at once."""

    def done(self) -> None:
        """Do nothing."""


class SharedDevices:
    """The turns of one process on shared devices. They are granted while `run` is active."""

    def __init__(self, service: Service, leave: Callable[[Parts], Awaitable[Parts]]) -> None:
        """`leave` takes parts off the devices and returns all parts that left with them. It is called between turns."""
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
        """Report and obey until cancelled. Raises RpcError if the scheduler refuses a report from this process."""
        while True:
            self._changed.clear()
            report = self._report()  # made now: the task starts later, when the parts may no longer match the number
            asking = asyncio.create_task(self._ask(report))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({asking, changed}, return_when=asyncio.FIRST_COMPLETED)
                order = asking.result() if asking.done() else None
            finally:
                for task in (asking, changed):
                    task.cancel()
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
                await asyncio.sleep(max(error.retry_after_s, BACKOFF_S))  # paces the retries


def take_turns(service: Service, leave: Callable[[Parts], Awaitable[Parts]]) -> SharedDevices:
    """Return the turns of `service`, and keep them running until the service ends.

    Raises BadInput if no supervisor started the process: a supervisor is needed to kill the process if it
    hangs on devices that others need, and to know when its memory is free.
    """
    if not service.supervised:
        raise BadInput(
            f"{service.name}: takes turns on shared devices (placement.colocate) and must be killed if it hangs, so "
            f"only a launcher may start it; use `python -m launch.ctl --run {service.run.path} restart {service.name}`",
        )
    turns = SharedDevices(service, leave)
    service.keep(turns.run())
    return turns
