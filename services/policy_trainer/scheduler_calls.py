"""The driver's calls to the scheduler, which are retried while the scheduler restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from proto import messages
from proto.messages import Ack, ErrorCode, WeightsRef
from proto.registry import Message, Request
from shared.batch import Batch
from shared.rpc.client import Client
from shared.rpc.errors import RpcError

R = TypeVar("R", bound=Message)

POLL_S = 20.0
"""Duration of one long poll in seconds. The scheduler answers NOT_READY shortly before the poll ends."""
PATIENCE_S = 120.0
"""Maximum time, in seconds, that the driver keeps retrying while the scheduler is away. A scheduler restart takes only
seconds."""
_AWAY = frozenset([ErrorCode.DEADLINE, ErrorCode.DRAINING, ErrorCode.BUSY])


@dataclass(frozen=True)
class StepTasks:
    """The tasks of a step with their scalars, and the scheduler's answer that contained them."""

    tasks: Batch
    answer: messages.StepBatch

    @classmethod
    def of(cls, answer: messages.StepBatch) -> StepTasks:
        return cls(Batch(answer.batch).with_scalars(answer.scalars), answer)


class SchedulerCalls:
    """Calls that carry the driver's incarnation. RpcError(conflict) means that another driver has taken over."""

    def __init__(
        self, client: Client, driver: int, on_batch: Callable[[messages.StepBatch, float], None] = lambda *_: None
    ) -> None:
        """`on_batch` receives each batch and how long the driver waited for it, in seconds."""
        self._client = client
        self._on_batch = on_batch
        self._driver = driver
        self._log = structlog.get_logger("driver")

    async def run_info(self) -> messages.RunInfo:
        """Return the state of the run."""
        return await self._ask(messages.GetRunInfo(driver=self._driver), messages.RunInfo)

    async def reloaded(self, step: int) -> messages.RunInfo:
        """Begin a new lineage of weights after the workers loaded checkpoint `step` (0 is the initial model).

        Return the state of the run, which is back at `step` if the steps committed after it cannot be replayed.
        """
        request = messages.GetRunInfo(driver=self._driver, reload=True, loaded_step=step)
        return await self._ask(request, messages.RunInfo)

    async def next_batch(self, step: int) -> StepTasks:
        """Wait for the journaled batch of `step` and return it."""
        began = time.monotonic()
        answer = await self._poll(messages.NextBatch(driver=self._driver, step=step), messages.StepBatch)
        self._on_batch(answer, time.monotonic() - began)
        return StepTasks.of(answer)

    async def commit(self, step: int, metrics: dict[str, float]) -> None:
        await self._ask(messages.CommitStep(driver=self._driver, step=step, metrics=metrics), Ack)

    async def publish(self, ref: WeightsRef) -> None:
        await self._ask(messages.PublishWeights(driver=self._driver, ref=ref), Ack)

    async def checkpoint_saved(self, step: int, kept: list[int], *, at_stop: bool = False) -> None:
        await self._ask(messages.CheckpointSaved(driver=self._driver, step=step, kept=kept, at_stop=at_stop), Ack)

    async def wait_evals(self, step: int) -> messages.EvalsDone:
        """Wait until the evaluations of version `step` are done and return their results."""
        return await self._poll(messages.WaitEvals(driver=self._driver, step=step), messages.EvalsDone)

    async def hold(self, split: str, epoch: int, first: int, count: int) -> None:
        """Have stores keep the shards of tasks `<split>/<epoch>/<first>` and following. Call this before the put."""
        request = messages.HoldShards(driver=self._driver, split=split, epoch=epoch, first=first, count=count)
        await self._ask(request, Ack)

    async def release(self, split: str, epoch: int, first: int, count: int, *, fence: int = 1) -> None:
        """End a `hold` and delete the shards up to `fence`. What is not held is no error."""
        request = messages.ReleaseShards(
            driver=self._driver, split=split, epoch=epoch, first=first, count=count, fence=fence
        )
        await self._ask(request, Ack)

    async def finish(self) -> None:
        await self._ask(messages.FinishRun(driver=self._driver), Ack)

    async def _poll(self, request: Request, reply: type[R]) -> R:
        """Repeat the request while the scheduler answers NOT_READY."""
        while True:
            try:
                return await self._ask(request, reply)
            except RpcError as error:
                if error.code != ErrorCode.NOT_READY:
                    raise
                self._log.info("waiting", request=type(request).__name__, answer=str(error))

    async def _ask(self, request: Request, reply: type[R]) -> R:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_S
        while True:
            try:
                return await self._client.call(request, reply, deadline_s=POLL_S)
            except RpcError as error:
                if error.code not in _AWAY or loop.time() >= give_up:
                    raise
                self._log.warning(
                    "scheduler does not answer, trying again", request=type(request).__name__, error=str(error)
                )
                await asyncio.sleep(error.retry_after_s or 0.2)  # only paces the retries
