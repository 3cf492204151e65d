"""The dispatch as a service: `python -m services.policy_trainer.dispatch_service --run D` instead of the driver.

It answers the calls that a single worker accepts, on behalf of the whole group, so that a server of another training
API (or another algorithm) needs only a `WorkerDispatch` with one client and no knowledge of topology, ranks or devices.
It does not start any training on its own, and it cannot run alongside a driver, because it uses the driver's mailbox.
It has one caller at a time: the one that took over last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable

from proto import messages
from proto.messages import ErrorCode, WorkerRequest
from proto.registry import Message
from services.policy_trainer.dispatch import WorkerDispatch, group_dispatch
from services.policy_trainer.worker.call_queue import CallQueue
from services.policy_trainer.worker.devices import NEEDS
from shared import topology as topologies
from shared.actor.process import run_process
from shared.actor.service import Service
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir


class DispatchService(Service):
    """Relays calls in the caller's order without waiting for one call to finish before making the next."""

    NAME = "policy-trainer"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        topology = topologies.load_resolved(run.topology)
        self._workers: WorkerDispatch = group_dispatch(topology.policy_model, self.client, self.incarnation)
        self._pending = CallQueue()
        self._answers: set[asyncio.Task[None]] = set()
        for kind in NEEDS:
            self.mailbox.handle(kind, self._queue)
        self.mailbox.handle(messages.GetWorkerState, self._take_over)

    async def serve(self) -> None:
        while True:
            request, call = await self._pending.next()
            try:
                made = self._workers.relay(request)
            except ValueError as error:
                self._pending.fail(str(error), epoch=self._pending.epoch)
                call.fail(RpcError(ErrorCode.BAD_REQUEST, str(error)))
                continue
            answer = asyncio.create_task(_answer(made, call))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)

    def _queue(self, request: WorkerRequest, call: Call) -> Deferred:
        self._pending.add(request, call)
        return DEFERRED

    async def _take_over(self, request: messages.GetWorkerState, _: Call) -> messages.WorkerState:
        """Take over the group and return its state. Calls in progress are refused, and their callers receive an
        error."""
        self._pending.take_over(request.driver, request.at_least, request.turn)
        state = await self._workers.take_over()
        return messages.WorkerState(
            step=state.step,
            driver=self._pending.driver,
            order=self._pending.done,
            dirty=state.dirty,
            snapshots=state.snapshots,
        )


async def _answer(made: Awaitable[Message], call: Call) -> None:
    try:
        call.reply(await made)
    except RpcError as error:
        call.fail(error)


if __name__ == "__main__":
    sys.exit(run_process(DispatchService, "policy_trainer.dispatch_service"))
