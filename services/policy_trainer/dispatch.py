"""The driver's view of its workers: one object that trains, whatever it is made of. Shows no rank and no device.

Calls run in the order in which they were made, each once: the number given here at the call decides, not the arrival.
A batch is divided over the data-parallel ranks here, by tokens; what travels is handles and per-sample numbers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from proto import messages
from proto.messages import BatchMeta, ErrorCode, LossSpec, WeightsRef, WorkerRequest
from proto.registry import Message
from proto.tensors import Array
from services.policy_trainer.layout import Layout
from services.policy_trainer.slicing import imbalance, slice_batch
from services.policy_trainer.sums import add_up
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError

R = TypeVar("R", bound=Message)

_RECOVERABLE = frozenset([ErrorCode.LOST, ErrorCode.MISSING, ErrorCode.DRAINING])
COMPUTE_S = 3600.0
"""Longest that one call to a worker may take, its place in the queue included."""
TAKE_OVER_S = 120.0
"""A worker that restarts imports its libraries first."""
OTHER_ERRORS_S = 1.0
"""After a rank has failed: how long to wait for what the others say, one of which may know the cause."""


class WorkersLost(RpcError):
    """A worker died, or shards it needed were gone: the group must be brought back to a known step (`resume`)."""


class WorkerDispatch:
    """Asynchronous calls to the worker group. Any may raise WorkersLost, or RpcError(conflict) for an old driver."""

    def __init__(self, clients: Sequence[Client], layout: Layout, driver: int) -> None:
        """`clients`: of the workers' mailboxes, by rank; `driver`: the incarnation that all calls carry."""
        self._clients = list(clients)
        self._driver = driver
        self._orders = itertools.count(1)
        self._places = [layout.place(rank) for rank in range(layout.world_size)]
        self._parts = layout.dp

    async def take_over(self) -> messages.WorkerState:
        """Where the workers stand; calls of other drivers are refused from here on, and numbering starts again.

        Ranks that do not stand at the same step are dirty: only a reload makes them one group again.
        """
        states = await self._take_over(0)
        order = max(state.order for state in states)
        if any(state.order != order for state in states):
            states = await self._take_over(order)
            order = max(state.order for state in states)
        self._orders = itertools.count(order + 1)
        steps = {state.step for state in states}
        dirty = any(state.dirty for state in states) or len(steps) > 1
        return messages.WorkerState(step=min(steps), driver=self._driver, order=order, dirty=dirty)

    async def _take_over(self, at_least: int) -> list[messages.WorkerState]:
        request = messages.GetWorkerState(driver=self._driver, at_least=at_least)
        calls = (client.call(request, messages.WorkerState, deadline_s=TAKE_OVER_S) for client in self._clients)
        return list(await asyncio.gather(*calls))

    async def init_model(self) -> messages.WorkerReady:
        """The topology's model, step 0, fresh optimizer state."""
        request = messages.InitModel(driver=self._driver, order=next(self._orders))
        return await self._first(request, messages.WorkerReady)

    async def load_checkpoint(self, step: int) -> messages.WorkerReady:
        """Weights and optimizer state after `step`. RpcError(missing or conflict): not there, or damaged."""
        request = messages.LoadCheckpoint(driver=self._driver, order=next(self._orders), step=step)
        return await self._first(request, messages.WorkerReady)

    async def forward(self, batch: BatchMeta, *, key: str, temperature: float) -> messages.ForwardDone:
        """Per-token log-probs of the present weights, put as shards; `meta` describes the new part.

        Its key is `key`, a dot and what is unique to this call.
        """
        order = next(self._orders)
        slices = slice_batch(batch, self._parts)
        requests = [
            messages.Forward(driver=self._driver, order=order, batch=each.batch, key=key, temperature=temperature)
            for each in slices
        ]
        answers = await self._all([requests[place.dp_rank] for place in self._places], messages.ForwardDone)
        handles = {task.task_id: task for answer in answers for task in answer.meta.tasks}
        meta = BatchMeta(
            tasks=[handles[task.task_id] for task in batch.tasks],
            parts=answers[0].meta.parts,
            stores=answers[0].meta.stores,
        )
        return messages.ForwardDone(meta=meta, seconds=max(answer.seconds for answer in answers))

    async def forward_backward(
        self, batch: BatchMeta, loss: LossSpec, *, advantages: Array, weights: Array, loss_weight: float = 1.0
    ) -> messages.ForwardBackwardDone:
        """Accumulate the gradient of `loss_weight` * sum(W * loss) over `batch`.

        `advantages`, `weights` float32 [samples] in batch order. The sums of the answer are over all ranks.
        """
        order = next(self._orders)
        slices = slice_batch(batch, self._parts)
        scaled = weights if loss_weight == 1.0 else (weights * np.float32(loss_weight)).astype(np.float32)
        requests = [
            messages.ForwardBackward(
                driver=self._driver,
                order=order,
                batch=each.batch,
                loss=loss,
                advantages=advantages[each.samples],
                weights=scaled[each.samples],
            )
            for each in slices
        ]
        answers = await self._all([requests[place.dp_rank] for place in self._places], messages.ForwardBackwardDone)
        sums: dict[str, float] = {}
        for answer in answers:
            add_up(sums, answer.sums)
        return messages.ForwardBackwardDone(
            sums=sums, seconds=max(answer.seconds for answer in answers), imbalance=imbalance(slices)
        )

    async def optim_step(self, step: int, *, last: bool) -> messages.OptimStepDone:
        """Clip and apply the accumulated gradient; `last`: the update that completes training step `step`."""
        request = messages.OptimStep(driver=self._driver, order=next(self._orders), step=step, last=last)
        return await self._first(request, messages.OptimStepDone)

    async def publish_weights(self, lineage: int, step: int, *, store: str, fence: int) -> WeightsRef:
        """Put the weights of version (lineage, step) into `store`; the reference proves the loading too."""
        request = messages.Publish(
            driver=self._driver, order=next(self._orders), lineage=lineage, step=step, store=store, fence=fence
        )
        published = await self._first(request, messages.Published)
        if published.ref is None:
            raise RpcError(ErrorCode.INTERNAL, f"{self._clients[0].peer} published weights without a reference")
        return published.ref

    async def save_checkpoint(self, step: int, *, keep_last: int) -> messages.Saved:
        """A durable, verified checkpoint of `step`; older ones past `keep_last` go."""
        request = messages.SaveCheckpoint(driver=self._driver, order=next(self._orders), step=step, keep_last=keep_last)
        return await self._first(request, messages.Saved)

    async def save_hf_model(self, path: Path) -> messages.Saved:
        """Export a Hugging Face folder to `path`."""
        request = messages.SaveModel(driver=self._driver, order=next(self._orders), path=str(path))
        return await self._first(request, messages.Saved)

    async def offload(self, parts: Sequence[str]) -> messages.Moved:
        """Give back the device memory of `parts`: "parameters", "gradients", "optimizer". Bytes are of all ranks."""
        return await self._move(parts, "host")

    async def backload(self, parts: Sequence[str]) -> messages.Moved:
        """Bring `parts` back ahead of the call that needs them (which would bring them back itself)."""
        return await self._move(parts, "device")

    async def _move(self, parts: Sequence[str], to: str) -> messages.Moved:
        request = messages.Move(driver=self._driver, order=next(self._orders), parts=list(parts), to=to)
        answers = await self._all([request] * len(self._clients), messages.Moved)
        return messages.Moved(
            nbytes=sum(answer.nbytes for answer in answers), seconds=max(answer.seconds for answer in answers)
        )

    async def _first(self, request: WorkerRequest, reply: type[R]) -> R:
        """Every rank does `request`; rank 0's answer is everybody's."""
        return (await self._all([request] * len(self._clients), reply))[0]

    async def _all(self, requests: Sequence[WorkerRequest], reply: type[R]) -> list[R]:
        """One request for each rank. When ranks fail, the error of one that knows the cause is raised."""
        calls = [
            asyncio.ensure_future(client.call(request, reply, deadline_s=COMPUTE_S))
            for client, request in zip(self._clients, requests, strict=True)
        ]
        try:
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=OTHER_ERRORS_S)
            errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
            if errors:
                raise _cause(errors)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The one error to raise: ranks that only heard of another's failure say LOST."""
    telling = [each for each in errors if not (isinstance(each, RpcError) and each.code == ErrorCode.LOST)]
    error = (telling or list(errors))[0]
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{error}; the worker may hang: ctl restart policy-trainer-worker")
    if isinstance(error, RpcError) and error.code in _RECOVERABLE:
        return WorkersLost(error.code, str(error), names=error.names)
    return error
