"""The driver's view of its workers: one object that trains and hides ranks and devices.

Each call runs once. Calls are numbered here and run in the order in which they were made, regardless of the order in
which they arrive. A call may be made before the previous one is awaited. Batches are divided among the data-parallel
ranks here, by tokens; only handles and per-sample numbers are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np

from proto import messages
from proto.messages import AdamW, BatchMeta, CreditSpec, ErrorCode, LossSpec, WeightsRef, WorkerRequest
from proto.registry import Message
from services.policy_trainer.metrics import add_up
from shared.batch import Batch
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rundir import parse_service_name
from shared.topology.models import TrainedModel

R = TypeVar("R", bound=Message)
Divided = messages.Forward | messages.Credit | messages.ForwardBackward | messages.ForwardBackwardModel
"""Calls whose batch is divided among the data-parallel ranks. All ranks get the same request for every other call."""

_RECOVERABLE = frozenset([ErrorCode.LOST, ErrorCode.MISSING, ErrorCode.DRAINING, ErrorCode.DEADLINE])
"""Error codes after which a reload helps. DEADLINE is included because workers answer with it after waiting for a
store."""
_FATAL = _RECOVERABLE - {ErrorCode.MISSING}
"""The same for the model of a client, who has lost only the call whose shards are gone."""
COMPUTE_S = 3600.0
"""Maximum time, in seconds, for one call to a worker, including its time in the queue."""
TAKE_OVER_S = 120.0
"""Deadline, in seconds, for taking over a worker. A worker that has restarted imports its libraries first."""
OTHER_ERRORS_S = 1.0
"""Seconds to wait for the other ranks' answers after one rank has failed, because another rank may know the cause."""
_NOT_YET = 0
"""Placeholder for `driver` and `order` in a request that has not been numbered."""


class WorkersLost(RpcError):
    """A worker died, or the shards that it needed were gone, or their store was unavailable for too long. The group
    must be brought back to a known step (`resume`)."""


class WorkerDispatch:
    """Asynchronous calls to the worker group, numbered when they are made. The caller must await their results.

    Every call may raise WorkersLost, or RpcError(conflict) if the driver has been replaced. The methods concern the
    model that the topology trains. For the models of a server's clients, see `services.policy_trainer.models`.
    """

    def __init__(self, clients: Sequence[Client], layout: Layout, driver: int) -> None:
        """`clients` call the workers' mailboxes, in rank order. `driver` is the incarnation that all calls carry."""
        self._clients = list(clients)
        self._driver = driver
        self._turn = 0
        self._order = 0
        """Number of the last call. Numbers are not reused: an old call may still reach a rank in its next life."""
        self._places = [layout.place(rank) for rank in range(layout.world_size)]
        self._parts = layout.dp
        self._step = -1
        """Training step of the workers after all calls made so far."""
        self._updates_left = 0
        self._snapshot_lineage = -1
        self._refused = False
        """Whether a call has failed. The workers refuse later calls until they are taken over again."""

    async def take_over(self, turn: int | None = None) -> messages.WorkerState:
        """Take control of the workers and return their state. They refuse other drivers and earlier calls from then on.

        `turn` is the driver's turn (`RunInfo.drivers`). It defaults to the turn of the previous call, or to 0 in the
        first call. The state is dirty if the ranks are at different steps; a reload is needed to make them one group
        again. The state lists the snapshots that every rank holds.
        """
        self._turn = self._turn if turn is None else turn
        states = await self._take_over(self._order)
        self._order = max(state.order for state in states)
        if any(state.order != self._order for state in states):
            states = await self._take_over(self._order)
            self._order = max(state.order for state in states)
        self._refused = False
        steps = {state.step for state in states}
        dirty = any(state.dirty for state in states) or len(steps) > 1
        self._step, self._updates_left, self._snapshot_lineage = min(steps), 0, -1
        common = [snapshot for snapshot in states[0].snapshots if all(snapshot in state.snapshots for state in states)]
        return messages.WorkerState(
            step=self._step, driver=self._driver, order=self._order, dirty=dirty, snapshots=common
        )

    async def go_on(self, step: int) -> None:
        """Make the workers accept calls again after they have refused one without changing anything. They must be
        at `step`.

        Raises WorkersLost if one of them is at another step, which means that it has restarted.
        """
        if not self._refused:
            return
        state = await self.take_over()
        if state.step != step:
            raise WorkersLost(ErrorCode.LOST, f"the workers are at step {state.step}, no longer at step {step}")

    async def _take_over(self, at_least: int) -> list[messages.WorkerState]:
        request = messages.GetWorkerState(driver=self._driver, at_least=at_least, turn=self._turn)
        calls = (client.call(request, messages.WorkerState, deadline_s=TAKE_OVER_S) for client in self._clients)
        try:
            return list(await asyncio.gather(*calls))
        except RpcError as error:  # such as DRAINING from a worker that exits because another one has died
            raise self._cause([error]) from None

    # ---- training

    def init_model(self) -> Awaitable[messages.WorkerReady]:
        """Load the topology's model at step 0 with fresh optimizer state."""
        self._step, self._updates_left = 0, 0
        return self._submit(messages.InitModel(driver=_NOT_YET, order=_NOT_YET), messages.WorkerReady)

    def forward(
        self,
        batch: Batch,
        keys: Sequence[str],
        temperature: float = 1.0,
        *,
        ends: bool = False,
        kl_estimator: str = "",
        sums: bool = False,
        routes: str = "",
    ) -> Awaitable[messages.ForwardDone]:
        """Compute a number per token and key with the current weights and put the numbers into the stores as shards,
        which the answer describes as a batch.

        `keys` are those of `messages.Forward`; log-probs are computed from logits / `temperature`. With `ends`, the
        answer has the scalar `value_after`, and with `kl_estimator`, `kl`. With `sums`, it has only the sums of the
        numbers of each sample, as scalars, and no shards. The policy's tokens use the experts in the shards of the key
        `routes`. The shards are stored under their key with a revision unique to this call; shards from a later call
        take their place.
        """
        request = messages.Forward(
            driver=_NOT_YET,
            order=_NOT_YET,
            batch=batch.meta,
            keys=list(keys),
            temperature=temperature,
            ends=ends,
            kl_estimator=kl_estimator,
            sums=sums,
            routes=routes,
        )
        return self._submit(request, messages.ForwardDone)

    def credit(self, batch: Batch, credit: CreditSpec) -> Awaitable[messages.CreditDone]:
        """Compute an advantage for each token, and its return if `credit` says so, and put them into the stores as
        shards, which the answer describes as a batch, with statistics of each task.

        `batch.scalars` holds the scalars of `messages.Credit`.
        """
        request = messages.Credit(driver=_NOT_YET, order=_NOT_YET, batch=batch.meta, credit=credit)
        return self._submit(request, messages.CreditDone)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Awaitable[messages.ForwardBackwardDone]:
        """Accumulate the gradient of sum(W * loss) over `batch`.

        `batch.scalars` holds `advantages` and `weights`, float32 [samples]. The sums in the answer are over all ranks.
        """
        request = messages.ForwardBackward(driver=_NOT_YET, order=_NOT_YET, batch=batch.meta, loss=loss)
        return self._submit(request, messages.ForwardBackwardDone)

    def begin_step(self, updates: int, *, snapshot_lineage: int = -1) -> None:
        """Combine the next `updates` optimizer steps into one training step. Without this call, each optimizer step is
        a training step of its own.

        If `snapshot_lineage` is 0 or more, the workers keep a snapshot in shared memory after the last of these
        updates, also if it is skipped, under this lineage.
        """
        self._updates_left, self._snapshot_lineage = updates, snapshot_lineage

    def optim_step(self, optimizer: AdamW) -> Awaitable[messages.OptimStepDone]:
        """Clip and apply the accumulated gradient. The answer contains the norm before clipping."""
        step, last, lineage = self._next_update()
        request = messages.OptimStep(
            driver=_NOT_YET, order=_NOT_YET, step=step, last=last, optimizer=optimizer, snapshot_lineage=lineage
        )
        return self._submit(request, messages.OptimStepDone)

    async def skip_update(self) -> None:
        """Skip an optimizer step whose data is bad: drop its gradient and leave the weights unchanged."""
        step, last, lineage = self._next_update()
        request = messages.SkipUpdate(driver=_NOT_YET, order=_NOT_YET, step=step, last=last, snapshot_lineage=lineage)
        await self._submit(request, messages.WorkerReady)

    # ---- state

    def publish_weights(self, lineage: int, step: int, *, store: str, fence: int = 1) -> Awaitable[WeightsRef]:
        """Put the weights of version (lineage, step) into `store`. Return the reference with which engines verify them.

        `fence` is the first fence to try. If the store has collected that fence, the next one that
        it has not collected is used.
        """
        return self.published(
            messages.Publish(driver=_NOT_YET, order=_NOT_YET, lineage=lineage, step=step, store=store, fence=fence)
        )

    async def _published(self, answer: Awaitable[messages.Published]) -> WeightsRef:
        published = await answer
        if published.ref is None:
            raise RpcError(ErrorCode.INTERNAL, f"{self._clients[0].peer} published weights without a reference")
        return published.ref

    def save_checkpoint(self, step: int, *, at_stop: bool = False) -> Awaitable[messages.Saved]:
        """Save a durable, verified checkpoint of `step`, which says whether it was saved `at_stop`."""
        request = messages.SaveCheckpoint(driver=_NOT_YET, order=_NOT_YET, step=step, at_stop=at_stop)
        return self._submit(request, messages.Saved)

    def load_checkpoint(self, step: int, *, snapshot_lineage: int = -1) -> Awaitable[messages.WorkerReady]:
        """Load the weights and optimizer state after `step`, from shared memory if `snapshot_lineage` is not -1.

        Raises RpcError: missing if there is no such state, conflict if the state is damaged.
        """
        self._step, self._updates_left = step, 0
        request = messages.LoadCheckpoint(driver=_NOT_YET, order=_NOT_YET, step=step, snapshot_lineage=snapshot_lineage)
        return self._submit(request, messages.WorkerReady)

    def save_hf_model(self, path: Path) -> Awaitable[messages.Saved]:
        """Export a Hugging Face folder to `path`."""
        return self._submit(messages.SaveModel(driver=_NOT_YET, order=_NOT_YET, path=str(path)), messages.Saved)

    def move(self, parts: Sequence[str], *, to: Literal["host", "device"]) -> Awaitable[messages.Moved]:
        """Move `parts` ("parameters", "gradients", "optimizer"): to the host to free their device memory, or back ahead
        of the call that needs them, which would otherwise move them itself. The answer sums the bytes of all ranks."""
        request = messages.Move(driver=_NOT_YET, order=_NOT_YET, parts=list(parts), to=to)
        return self._submit(request, messages.Moved)

    # ---- calling

    def call(self, request: WorkerRequest, reply: type[R]) -> Awaitable[R]:
        """Make a call, whose `driver` and `order` are replaced by this dispatch's own. Calls run in the order in which
        they are made."""
        return self._submit(request, reply)

    def published(self, request: messages.Publish | messages.PublishModel) -> Awaitable[WeightsRef]:
        """Make a call that publishes, as `call` does, and return the reference."""
        return asyncio.ensure_future(self._published(self._submit(request, messages.Published)))

    def _next_update(self) -> tuple[int, bool, int]:
        """Return the training step to which the next update belongs, whether it is the last of that step, and the
        lineage of the snapshot after it (-1: none)."""
        step, last = self._step + 1, self._updates_left <= 1
        self._updates_left = max(self._updates_left - 1, 0)
        if not last:
            return step, last, -1
        self._step = step
        lineage, self._snapshot_lineage = self._snapshot_lineage, -1
        return step, last, lineage

    def _submit(self, request: WorkerRequest, reply: type[R]) -> Awaitable[R]:
        """Assign the next number to `request` at once, and send every rank its part. The result is the merged
        answer."""
        self._order += 1
        numbered = msgspec.structs.replace(request, driver=self._driver, order=self._order)
        return asyncio.ensure_future(self._call(numbered, reply))

    async def _call(self, request: WorkerRequest, reply: type[R]) -> R:
        if not isinstance(request, Divided):
            return merged(await self._call_all([request] * len(self._clients), reply))
        batch = Batch(request.batch)
        chunks = batch.chunk(self._parts)
        parts = [msgspec.structs.replace(request, batch=chunk.meta) for chunk in chunks]
        answer = merged(await self._call_all([parts[place.dp_rank] for place in self._places], reply))
        if isinstance(answer, messages.ForwardDone | messages.CreditDone):
            return cast(R, _in_order(answer, batch.task_ids))
        if isinstance(answer, messages.ForwardBackwardDone):
            meta = answer.meta and Batch(answer.meta).take(_places(answer.meta, batch.task_ids)).meta
            return cast(R, msgspec.structs.replace(answer, imbalance=imbalance(chunks), meta=meta))
        return answer

    async def _call_all(self, requests: Sequence[WorkerRequest], reply: type[R]) -> list[R]:
        """Send one request to each rank. If ranks fail, raise the error of a rank that knows the cause."""
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
                if isinstance(requests[0], messages.ModelRequest):
                    raise self._cause(errors, _FATAL)
                self._refused = True
                raise self._cause(errors)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _cause(
        self, errors: Sequence[BaseException], recoverable: frozenset[ErrorCode] = _RECOVERABLE
    ) -> BaseException:
        """Select the error to raise: WorkersLost for the `recoverable` codes. Ranks that have only learned of another
        rank's failure answer with LOST."""
        bad = [error for error in errors if isinstance(error, RpcError) and error.code == ErrorCode.BAD_DATA]
        if bad:  # each rank names its own tasks
            return RpcError(
                bad[0].code, str(bad[0]), names=list(dict.fromkeys(name for error in bad for name in error.names))
            )
        telling = [error for error in errors if not (isinstance(error, RpcError) and error.code == ErrorCode.LOST)]
        error = (telling or list(errors))[0]
        if isinstance(error, DeadlineExceeded):
            service, _ = parse_service_name(self._clients[0].peer)
            return DeadlineExceeded(f"{error}; the worker may be hanging: ctl restart {service}")
        if isinstance(error, RpcError) and error.code in recoverable:
            return WorkersLost(error.code, str(error), names=error.names)
        return error


def group_dispatch(model: TrainedModel, client: Callable[[str, int], Client], driver: int) -> WorkerDispatch:
    """Return a dispatch for the ranks of `model`. `client` returns the client for a service instance."""
    parallel = model.settings.parallel
    layout = Layout(model.settings.world_size, parallel.tp, parallel.pp, parallel.cp, parallel.ep)
    return WorkerDispatch([client(model.service, rank) for rank in range(layout.world_size)], layout, driver)


def merged(answers: Sequence[R]) -> R:
    """Merge the answers of all ranks: add up sums, join the parts of a batch, and take the times of the slowest rank.

    For other reply types, return rank 0's answer. `answers` are in rank order and have the same type.
    """
    first = answers[0]
    if isinstance(first, messages.ForwardBackwardDone):
        gradients, sums = cast(Sequence[messages.ForwardBackwardDone], answers), dict[str, float]()
        for answer in gradients:
            add_up(sums, answer.sums)
        seconds = max(answer.seconds for answer in gradients)
        metas = [Batch(answer.meta) for answer in gradients if answer.meta is not None]
        meta = Batch.concat(metas).meta if metas else None
        return cast(R, msgspec.structs.replace(first, sums=sums, seconds=seconds, meta=meta))
    if isinstance(first, messages.ForwardDone | messages.CreditDone):
        parts = cast(Sequence[messages.ForwardDone | messages.CreditDone], answers)
        meta = Batch.concat([Batch(part.meta) for part in parts]).meta
        whole = msgspec.structs.replace(first, meta=meta, seconds=max(part.seconds for part in parts))
        if isinstance(whole, messages.CreditDone):
            credits = cast(Sequence[messages.CreditDone], answers)
            given = [part.statistics for part in credits if part.statistics]  # ranks that put nothing have none
            names = given[0] if given else ()
            statistics = {name: np.concatenate([part[name] for part in given]) for name in names}
            whole = msgspec.structs.replace(whole, statistics=statistics)
        return cast(R, whole)
    if isinstance(first, messages.Moved):
        moves = cast(Sequence[messages.Moved], answers)
        total = sum(move.nbytes for move in moves)
        return cast(R, messages.Moved(nbytes=total, seconds=max(move.seconds for move in moves)))
    return first


def imbalance(chunks: Sequence[Batch]) -> float:
    """Return the token count of the fullest rank divided by the mean count, or 1.0 if there are no tokens."""
    tokens = [chunk.tokens for chunk in chunks]
    return max(tokens) * len(tokens) / sum(tokens) if sum(tokens) else 1.0


def _in_order(
    done: messages.ForwardDone | messages.CreditDone, task_ids: Sequence[str]
) -> messages.ForwardDone | messages.CreditDone:
    """Return `done` with its tasks in the order of `task_ids`."""
    order = _places(done.meta, task_ids)
    ordered = msgspec.structs.replace(done, meta=Batch(done.meta).take(order).meta)
    if isinstance(ordered, messages.CreditDone):
        statistics = {name: values[order] for name, values in ordered.statistics.items()}
        return msgspec.structs.replace(ordered, statistics=statistics)
    return ordered


def _places(meta: BatchMeta, task_ids: Sequence[str]) -> list[int]:
    """Return the position in `meta` of each of `task_ids`."""
    at = {task.task_id: index for index, task in enumerate(meta.tasks)}
    return [at[task_id] for task_id in task_ids]
