"""A queue that yields each call of one driver once, in the driver's order, and refuses other drivers."""

from __future__ import annotations

import asyncio

from proto.messages import ErrorCode, WorkerRequest
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call


class CallQueue:
    """The queue between the mailbox and the compute thread. Use it only on the event loop.

    A driver takes over the queue with its incarnation. From then on other drivers are refused, and so is every call
    after a failed one: a step must not be taken with an incomplete gradient.
    """

    def __init__(self) -> None:
        self.driver = 0
        self.done = 0
        """Number of the last call taken from the queue."""
        self.epoch = 0
        """Number of take-overs."""
        self._turn = 0
        self._retired: set[int] = set()
        self._waiting: dict[int, tuple[WorkerRequest, Call]] = {}
        self._failed = ""
        self._arrived = asyncio.Event()

    def take_over(self, driver: int, at_least: int = 0, turn: int = 0) -> None:
        """Make `driver` the only caller and refuse all waiting calls. The driver's call numbers begin above `at_least`.

        Raises RpcError(conflict) if `driver` has already been replaced. A lower `turn` also indicates this. The message
        of a replaced driver may arrive after that of its successor.
        """
        if driver in self._retired or turn < self._turn:
            raise RpcError(ErrorCode.CONFLICT, f"driver {driver:x} was replaced by {self.driver:x}; it must exit")
        if self.driver not in (0, driver):
            self._retired.add(self.driver)
        self.driver, self._turn = driver, turn
        self.epoch += 1
        self._failed = ""
        for _, call in self._waiting.values():
            call.fail(RpcError(ErrorCode.LOST, f"driver {driver:x} has taken over the worker"))
        self._waiting.clear()
        self.done = max(self.done, at_least)

    def add(self, request: WorkerRequest, call: Call) -> None:
        """Queue a call. Raises RpcError: conflict for another driver or a used number, lost if an earlier call failed
        or if no driver has taken over this life of the worker yet."""
        name = type(request).__name__
        if not self.driver:
            raise RpcError(ErrorCode.LOST, f"{name}: this life of the worker has no driver yet; take it over first")
        if request.driver != self.driver:
            raise RpcError(
                ErrorCode.CONFLICT, f"{name} of driver {request.driver:x} refused: {self.driver:x} has taken over"
            )
        if self._failed:
            raise RpcError(ErrorCode.LOST, f"{name} refused: an earlier call failed ({self._failed})")
        if request.order <= self.done or request.order in self._waiting:
            raise RpcError(ErrorCode.CONFLICT, f"{name}: order {request.order} was already used; {self.done} are done")
        self._waiting[request.order] = (request, call)
        self._arrived.set()

    async def next(self) -> tuple[WorkerRequest, Call]:
        """Wait for the next call in order and return it."""
        while self.done + 1 not in self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        self.done += 1
        return self._waiting.pop(self.done)

    @property
    def followed(self) -> bool:
        """Whether the next call in order is already waiting."""
        return self.done + 1 in self._waiting

    def fail(self, cause: str, *, epoch: int) -> None:
        """Refuse all calls after the one that failed in `epoch`, until the driver takes over again."""
        if epoch != self.epoch:
            return
        self._failed = cause
        for request, call in self._waiting.values():
            call.fail(RpcError(ErrorCode.LOST, f"{type(request).__name__} refused: an earlier call failed ({cause})"))
        self._waiting.clear()
