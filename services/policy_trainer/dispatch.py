"""The driver's view of its workers: one object that trains, whatever it is made of. Shows no rank and no device.

Calls run in the order in which they were made, each once: the number given here at the call decides, not the arrival.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TypeVar

from proto import messages
from proto.messages import BatchMeta, ErrorCode, LossSpec, WeightsRef
from proto.registry import Message
from proto.tensors import Array
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError

R = TypeVar("R", bound=Message)

_RECOVERABLE = frozenset([ErrorCode.LOST, ErrorCode.MISSING, ErrorCode.DRAINING])
COMPUTE_S = 3600.0
"""Longest that one call to a worker may take, its place in the queue included."""
TAKE_OVER_S = 120.0
"""A worker that restarts imports its libraries first."""


class WorkersLost(RpcError):
    """A worker died, or shards it needed were gone: the group must be brought back to a known step (`resume`)."""


class WorkerDispatch:
    """Asynchronous calls to the worker group. Any may raise WorkersLost, or RpcError(conflict) for an old driver."""

    def __init__(self, client: Client, driver: int) -> None:
        """`client`: of the worker's mailbox; `driver`: the incarnation that all calls carry."""
        self._client = client
        self._driver = driver
        self._orders = itertools.count(1)

    async def take_over(self) -> messages.WorkerState:
        """Where the workers stand; calls of other drivers are refused from here on, and numbering starts again."""
        request = messages.GetWorkerState(driver=self._driver)
        state = await self._client.call(request, messages.WorkerState, deadline_s=TAKE_OVER_S)
        self._orders = itertools.count(state.order + 1)
        return state

    async def init_model(self) -> messages.WorkerReady:
        """The topology's model, step 0, fresh optimizer state."""
        return await self._call(messages.InitModel(driver=self._driver, order=next(self._orders)), messages.WorkerReady)

    async def load_checkpoint(self, step: int) -> messages.WorkerReady:
        """Weights and optimizer state after `step`. RpcError(missing or conflict): not there, or damaged."""
        request = messages.LoadCheckpoint(driver=self._driver, order=next(self._orders), step=step)
        return await self._call(request, messages.WorkerReady)

    async def forward(self, batch: BatchMeta, *, key: str, temperature: float) -> messages.ForwardDone:
        """Per-token log-probs of the present weights, put as shards `key`; `meta` describes the new part."""
        request = messages.Forward(
            driver=self._driver, order=next(self._orders), batch=batch, key=key, temperature=temperature
        )
        return await self._call(request, messages.ForwardDone)

    async def forward_backward(
        self, batch: BatchMeta, loss: LossSpec, *, advantages: Array, weights: Array
    ) -> messages.ForwardBackwardDone:
        """Accumulate the gradient of sum(W * loss); `advantages`, `weights` float32 [samples] in batch order."""
        request = messages.ForwardBackward(
            driver=self._driver,
            order=next(self._orders),
            batch=batch,
            loss=loss,
            advantages=advantages,
            weights=weights,
        )
        return await self._call(request, messages.ForwardBackwardDone)

    async def optim_step(self, step: int, *, last: bool) -> messages.OptimStepDone:
        """Clip and apply the accumulated gradient; `last`: the update that completes training step `step`."""
        request = messages.OptimStep(driver=self._driver, order=next(self._orders), step=step, last=last)
        return await self._call(request, messages.OptimStepDone)

    async def publish_weights(self, lineage: int, step: int, *, store: str, fence: int) -> WeightsRef:
        """Put the weights of version (lineage, step) into `store`; the reference proves the loading too."""
        request = messages.Publish(
            driver=self._driver, order=next(self._orders), lineage=lineage, step=step, store=store, fence=fence
        )
        return (await self._call(request, messages.Published)).ref

    async def save_checkpoint(self, step: int, *, keep_last: int) -> messages.Saved:
        """A durable, verified checkpoint of `step`; older ones past `keep_last` go."""
        request = messages.SaveCheckpoint(driver=self._driver, order=next(self._orders), step=step, keep_last=keep_last)
        return await self._call(request, messages.Saved)

    async def save_hf_model(self, path: Path) -> messages.Saved:
        """Export a Hugging Face folder to `path`."""
        return await self._call(
            messages.SaveModel(driver=self._driver, order=next(self._orders), path=str(path)), messages.Saved
        )

    async def _call(self, request: messages.WorkerRequest, reply: type[R]) -> R:
        try:
            return await self._client.call(request, reply, deadline_s=COMPUTE_S)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; the worker may hang: ctl restart policy-trainer-worker") from None
        except RpcError as error:
            if error.code in _RECOVERABLE:
                raise WorkersLost(error.code, str(error), names=error.names) from None
            raise
