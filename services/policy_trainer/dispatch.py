"""The driver's view of its workers: one object that trains, whatever it is made of. Shows no rank and no device.

Calls run in the order in which they were made, each once: the number given here at the call decides, not the arrival.
The next call may be made before the last one is awaited. A batch is divided over the data-parallel ranks here, by
tokens; what travels is handles and per-sample numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import numpy as np

from proto import messages
from proto.messages import BatchMeta, ErrorCode, LossSpec, WeightsRef, WorkerRequest
from proto.registry import Message
from services.policy_trainer.batches import WEIGHTS
from services.policy_trainer.merging import merged
from services.policy_trainer.slicing import imbalance, slice_batch
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError

R = TypeVar("R", bound=Message)
Divided = messages.Forward | messages.ForwardBackward
"""Calls whose batch is divided over the data-parallel ranks; of all others every rank gets the same."""

_RECOVERABLE = frozenset([ErrorCode.LOST, ErrorCode.MISSING, ErrorCode.DRAINING, ErrorCode.DEADLINE])
"""Deadlines are a worker's: it waited for a store."""
COMPUTE_S = 3600.0
"""Longest that one call to a worker may take, its place in the queue included."""
TAKE_OVER_S = 120.0
"""A worker that restarts imports its libraries first."""
OTHER_ERRORS_S = 1.0
"""After a rank has failed: how long to wait for what the others say, one of which may know the cause."""
_NOT_YET = 0
"""Of `driver` and `order` in a request that has not been numbered."""


class WorkersLost(RpcError):
    """A worker died, or shards it needed were gone or their store away for too long: the group must be brought back to
    a known step (`resume`)."""


class WorkerDispatch:
    """Asynchronous calls to the worker group, numbered when they are made; what they return must be awaited.

    Any may raise WorkersLost, or RpcError(conflict) for an old driver. The model may be a group of ranks or another
    dispatch on the bus (`dispatch_service`), which answers like a single rank.
    """

    def __init__(self, clients: Sequence[Client], layout: Layout, driver: int) -> None:
        """`clients`: of the workers' mailboxes, by rank; `driver`: the incarnation that all calls carry."""
        self._clients = list(clients)
        self._driver = driver
        self._order = 0
        """Number of the last call; none is given twice, since an old call may still reach a rank in its next life."""
        self._places = [layout.place(rank) for rank in range(layout.world_size)]
        self._parts = layout.dp
        self._step = -1
        """The training step that the calls made so far lead to."""
        self._updates_left = 0
        self._refused = False
        """A call failed: the workers refuse what was sent after it until they are taken over again."""

    async def take_over(self) -> messages.WorkerState:
        """Where the workers stand; calls of other drivers, and earlier ones of this, are refused from here on.

        Ranks that do not stand at the same step are dirty: only a reload makes them one group again.
        """
        states = await self._take_over(self._order)
        self._order = max(state.order for state in states)
        if any(state.order != self._order for state in states):
            states = await self._take_over(self._order)
            self._order = max(state.order for state in states)
        self._refused = False
        steps = {state.step for state in states}
        dirty = any(state.dirty for state in states) or len(steps) > 1
        self._step, self._updates_left = min(steps), 0
        return messages.WorkerState(step=self._step, driver=self._driver, order=self._order, dirty=dirty)

    async def go_on(self, step: int) -> None:
        """Have the workers take calls again if they refused one, with nothing changed: they have to stand at `step`.

        Raises WorkersLost when one of them stands elsewhere: it is in another life.
        """
        if not self._refused:
            return
        state = await self.take_over()
        if state.step != step:
            raise WorkersLost(ErrorCode.LOST, f"the workers stand at step {state.step}, not at {step} any more")

    async def _take_over(self, at_least: int) -> list[messages.WorkerState]:
        request = messages.GetWorkerState(driver=self._driver, at_least=at_least)
        calls = (client.call(request, messages.WorkerState, deadline_s=TAKE_OVER_S) for client in self._clients)
        return list(await asyncio.gather(*calls))

    # ---- training

    def init_model(self) -> Awaitable[messages.WorkerReady]:
        """The topology's model, step 0, fresh optimizer state."""
        self._step, self._updates_left = 0, 0
        return self._submit(messages.InitModel(driver=_NOT_YET, order=_NOT_YET), messages.WorkerReady)

    def forward(self, batch: BatchMeta, keys: Sequence[str]) -> Awaitable[messages.ForwardDone]:
        """Per-token values of the present weights, put as shards; `meta` describes the new part.

        `keys`: which; so far ["prox_logprobs"], at the training sampling's temperature. The shards' own key is that
        with a revision of this call alone: a later call takes the place of its shards.
        """
        request = messages.Forward(driver=_NOT_YET, order=_NOT_YET, batch=batch, keys=list(keys))
        return self._submit(request, messages.ForwardDone)

    def forward_backward(
        self, batch: BatchMeta, loss: LossSpec, loss_weight: float = 1.0
    ) -> Awaitable[messages.ForwardBackwardDone]:
        """Accumulate the gradient of `loss_weight` * sum(W * loss) over `batch`.

        `batch.scalars` holds `advantages` and `weights`, float32 [samples]. The sums of the answer are over all ranks.
        """
        if loss_weight != 1.0 and WEIGHTS in batch.scalars:
            scaled = (batch.scalars[WEIGHTS] * np.float32(loss_weight)).astype(np.float32)
            batch = msgspec.structs.replace(batch, scalars=batch.scalars | {WEIGHTS: scaled})
        request = messages.ForwardBackward(driver=_NOT_YET, order=_NOT_YET, batch=batch, loss=loss)
        return self._submit(request, messages.ForwardBackwardDone)

    def begin_step(self, updates: int) -> None:
        """The next `updates` optimizer steps make up one training step; without this each is one by itself."""
        self._updates_left = updates

    def optim_step(self) -> Awaitable[messages.OptimStepDone]:
        """Clip and apply the accumulated gradient: its norm before clipping, and the learning rate."""
        step, last = self._next_update()
        request = messages.OptimStep(driver=_NOT_YET, order=_NOT_YET, step=step, last=last)
        return self._submit(request, messages.OptimStepDone)

    async def skip_update(self) -> None:
        """In the place of an optimizer step whose data is bad: its gradient is forgotten, the weights stay."""
        step, last = self._next_update()
        await self._submit(
            messages.SkipUpdate(driver=_NOT_YET, order=_NOT_YET, step=step, last=last), messages.WorkerReady
        )

    # ---- state

    def publish_weights(self, lineage: int, step: int, *, store: str, fence: int = 1) -> Awaitable[WeightsRef]:
        """Put the weights of version (lineage, step) into `store`; the reference proves the loading too.

        `fence`: the first one to use, the next one where the store has collected it.
        """
        request = messages.Publish(
            driver=_NOT_YET, order=_NOT_YET, lineage=lineage, step=step, store=store, fence=fence
        )
        return asyncio.ensure_future(self._published(self._submit(request, messages.Published)))

    async def _published(self, answer: Awaitable[messages.Published]) -> WeightsRef:
        published = await answer
        if published.ref is None:
            raise RpcError(ErrorCode.INTERNAL, f"{self._clients[0].peer} published weights without a reference")
        return published.ref

    def save_checkpoint(self, step: int, *, keep_last: int, at_stop: bool = False) -> Awaitable[messages.Saved]:
        """A durable, verified checkpoint of `step`; older ones past `keep_last` go, which one `at_stop` does not
        count for."""
        request = messages.SaveCheckpoint(
            driver=_NOT_YET, order=_NOT_YET, step=step, keep_last=keep_last, at_stop=at_stop
        )
        return self._submit(request, messages.Saved)

    def load_checkpoint(self, step: int) -> Awaitable[messages.WorkerReady]:
        """Weights and optimizer state after `step`. RpcError(missing or conflict): not there, or damaged."""
        self._step, self._updates_left = step, 0
        request = messages.LoadCheckpoint(driver=_NOT_YET, order=_NOT_YET, step=step)
        return self._submit(request, messages.WorkerReady)

    def save_hf_model(self, path: Path) -> Awaitable[messages.Saved]:
        """Export a Hugging Face folder to `path`."""
        return self._submit(messages.SaveModel(driver=_NOT_YET, order=_NOT_YET, path=str(path)), messages.Saved)

    def offload(self, parts: Sequence[str]) -> Awaitable[messages.Moved]:
        """Give back the device memory of `parts`: "parameters", "gradients", "optimizer". Bytes are of all ranks."""
        return self._move(parts, "host")

    def backload(self, parts: Sequence[str]) -> Awaitable[messages.Moved]:
        """Bring `parts` back ahead of the call that needs them (which would bring them back itself)."""
        return self._move(parts, "device")

    def _move(self, parts: Sequence[str], to: str) -> Awaitable[messages.Moved]:
        request = messages.Move(driver=_NOT_YET, order=_NOT_YET, parts=list(parts), to=to)
        return self._submit(request, messages.Moved)

    # ---- on the way

    def relay(self, request: WorkerRequest) -> Awaitable[Message]:
        """Make the call that somebody else's dispatch made of us; its driver and order are replaced by our own."""
        return self._submit(request, type(request).REPLY)

    def _next_update(self) -> tuple[int, bool]:
        """Which training step the next update belongs to, and whether it is its last."""
        step, last = self._step + 1, self._updates_left <= 1
        self._updates_left = max(self._updates_left - 1, 0)
        if last:
            self._step = step
        return step, last

    def _submit(self, request: WorkerRequest, reply: type[R]) -> Awaitable[R]:
        """Number `request` now and have every rank do its part; the answer is one of all."""
        self._order += 1
        numbered = msgspec.structs.replace(request, driver=self._driver, order=self._order)
        return asyncio.ensure_future(self._call(numbered, reply))

    async def _call(self, request: WorkerRequest, reply: type[R]) -> R:
        if not isinstance(request, Divided):
            return merged(await self._all([request] * len(self._clients), reply))
        slices = slice_batch(request.batch, self._parts)
        parts = [msgspec.structs.replace(request, batch=each.batch) for each in slices]
        answer = merged(await self._all([parts[place.dp_rank] for place in self._places], reply))
        if isinstance(answer, messages.ForwardDone):
            return cast(R, _in_order(answer, request.batch))
        if isinstance(answer, messages.ForwardBackwardDone) and self._parts > 1:
            return cast(R, msgspec.structs.replace(answer, imbalance=imbalance(slices)))
        return answer

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
                self._refused = True
                raise _cause(errors)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def _in_order(done: messages.ForwardDone, batch: BatchMeta) -> messages.ForwardDone:
    """The handles that the ranks made, in the order of `batch`."""
    handles = {task.task_id: task for task in done.meta.tasks}
    tasks = [handles[task.task_id] for task in batch.tasks]
    return msgspec.structs.replace(done, meta=msgspec.structs.replace(done.meta, tasks=tasks))


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The one error to raise: ranks that only heard of another's failure say LOST."""
    bad = [each for each in errors if isinstance(each, RpcError) and each.code == ErrorCode.BAD_DATA]
    if bad:  # each rank names its own tasks
        return RpcError(
            bad[0].code, str(bad[0]), names=list(dict.fromkeys(name for each in bad for name in each.names))
        )
    telling = [each for each in errors if not (isinstance(each, RpcError) and each.code == ErrorCode.LOST)]
    error = (telling or list(errors))[0]
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{error}; the worker may hang: ctl restart policy-trainer-worker")
    if isinstance(error, RpcError) and error.code in _RECOVERABLE:
        return WorkersLost(error.code, str(error), names=error.names)
    return error
