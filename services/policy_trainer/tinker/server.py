"""The hub of a server: it feeds the state machine and carries out what it asks for.

Nothing is answered before the journal has it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from proto.messages import LossSpec, WeightsRef
from proto.tensors import Array
from services.policy_trainer.models import Datum, logprobs_of, put_data, shards_of
from services.policy_trainer.sampling.sampler import Sampler
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.tinker.errors import BadRequest
from services.policy_trainer.tinker.events import (
    ClockTick,
    Commit,
    Effect,
    Event,
    Fetched,
    Kept,
    ReleaseData,
    ReleaseVersion,
    RemoveFolder,
    Settle,
    Stopping,
    Submitted,
    WorkerCall,
    WorkersGone,
    WorkersReady,
)
from services.policy_trainer.tinker.journal import ServerJournal
from services.policy_trainer.tinker.records import Belonging, Model, Record, RequestKind, TrainingRequest
from services.policy_trainer.tinker.state import State
from services.policy_trainer.tinker.trainer import Trainer, model_folder
from services.policy_trainer.tinker.wire import forward_backward_output
from shared.dataplane.client import DataClient
from shared.rpc.errors import RpcError
from shared.stages import API
from shared.topology import TRAINER_STORE

TICK_S = 5.0
METRICS = "metrics.jsonl"


class Server:
    """One state machine with its journal, its workers and those who wait for results."""

    def __init__(
        self,
        state: State,
        journal: ServerJournal,
        trainer: Trainer,
        scheduler: SchedulerCalls,
        sampler: Sampler,
        data: DataClient,
        run: Path,
    ) -> None:
        self.state = state
        self._journal = journal
        self._trainer = trainer
        self._scheduler = scheduler
        self._sampler = sampler
        self._data = data
        self.folder = run
        self._waiting: dict[str, asyncio.Event] = {}
        self._submitting: dict[str, asyncio.Task[TrainingRequest]] = {}
        self._parked = asyncio.Event()
        self._reserved: dict[str, int] = {}
        self._releases: asyncio.Queue[ReleaseData | WeightsRef] = asyncio.Queue()
        self._work: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = structlog.get_logger("server")

    def begin(self, records: Iterable[Belonging | TrainingRequest]) -> None:
        """Take over the records of an earlier life."""
        for effect in self.state.restore(records):
            self._carry_out(effect)

    async def run(self) -> None:
        """Take over the workers and work until cancelled. Raises RpcError(conflict) if another server runs, and
        RpcError(internal) if the journal cannot be written."""
        self._begin(self._take_over())
        tasks = [asyncio.create_task(work) for work in (self._tick(), self._release())]
        try:
            done, _ = await asyncio.wait({*tasks, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            everything = [*tasks, *self._work, *self._submitting.values()]
            for work in everything:
                work.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            self._journal.close()

    async def park(self) -> None:
        """Write the state of all models to disk, which then outlives the run."""
        self.handle(Stopping())
        await self._parked.wait()

    def handle(self, event: Event) -> None:
        """Let something happen."""
        try:
            for effect in self.state.handle(event, self.now()):
                self._carry_out(effect)
        except RpcError as error:
            self._fail(error)
            raise
        if self.state.is_over:
            self._parked.set()

    @staticmethod
    def now() -> float:
        """Return the time in seconds since the epoch."""
        return time.time()

    def write(self, kept: Iterable[Record], dropped: Iterable[tuple[str, str]]) -> None:
        """Keep and drop records of which the state machine knows nothing. Raises RpcError(internal), which ends the
        server."""
        try:
            self._journal.write(kept, dropped)
        except RpcError as error:
            self._fail(error)
            raise

    def keep(self, record: Belonging) -> None:
        """Journal a record that was made or changed."""
        self.handle(Kept(record))

    # ---- requests

    async def submit(
        self,
        model: Model,
        request: TrainingRequest,
        loss: LossSpec | None = None,
        data: Sequence[Datum] = (),
        refused: str = "",
    ) -> TrainingRequest:
        """Journal a training request, after its data are in the store, and return it. The same request again returns
        the first one. Raises BadRequest."""
        known = self.state.requests.get(request.id)
        if known is not None or request.seq <= model.reached:
            return known or request
        if (task := self._submitting.get(request.id)) is None:
            task = asyncio.create_task(self._submit(model, request, loss, data, refused))
            self._submitting[request.id] = task
            task.add_done_callback(lambda _: self._submitting.pop(request.id, None))
        return await asyncio.shield(task)

    async def _submit(
        self, model: Model, request: TrainingRequest, loss: LossSpec | None, data: Sequence[Datum], refused: str
    ) -> TrainingRequest:
        shards: list[dict[str, Array]] = []
        if loss is not None and not refused:
            try:
                shards = [shards_of(datum, loss) for datum in data]
            except ValueError as error:
                refused = str(error)
        nbytes = sum(array.nbytes for arrays in shards for array in arrays.values())
        self.state.admit(model, request.seq, nbytes)
        if shards and not refused:
            refused = self.state.too_much(model, nbytes)
        if shards and not refused:
            request.first = self._reserve(model, request, len(shards))
            request.loss, request.nbytes = loss, nbytes
            request.tokens = [len(datum.token_ids) for datum in data]
            request.shapes = [list(datum.targets.shape) for datum in data]
            try:
                await self._scheduler.hold(API, model.number, request.first, len(shards))
                batch = await put_data(self._data, TRAINER_STORE, model.number, request.first, shards)
            except RpcError as error:
                self._log.warning("data not stored", request=request.id, error=str(error))
                raise BadRequest(f"the store does not take the data: {error}", 503) from error
            request.meta = batch.meta
        request.refused = refused
        self.handle(Submitted(request))
        self._reserved.pop(request.id, None)
        return request

    def _reserve(self, model: Model, request: TrainingRequest, count: int) -> int:
        """Return the index of the first of `count` tasks for the data of a request. A repeated attempt has the same
        tasks; no other request ever has them, not even after a restart."""
        if request.id not in self._reserved:
            self._reserved[request.id], model.tasks = model.tasks, model.tasks + count
            self.keep(model)
        return self._reserved[request.id]

    async def wait(self, key: str, name: str, wait_s: float) -> TrainingRequest | None:
        """Return a request once it is done, or None if it is not within `wait_s`. Raises BadRequest."""
        request = self.state.request(key, name)
        if not request.done:
            event = self._waiting.setdefault(name, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), wait_s)
            except TimeoutError:
                return None
        return request

    async def output(self, request: TrainingRequest) -> bytes:
        """Return the result of a `forward_backward` as protobuf. Raises RpcError."""
        parts = await asyncio.gather(*(logprobs_of(self._data, part) for part in request.parts))
        arrays = [array for part in parts for array in part]
        shaped = [array.reshape(shape) for array, shape in zip(arrays, request.shapes, strict=True)]
        return forward_backward_output(shaped, metrics(request))

    def fetched(self, request: TrainingRequest) -> None:
        """Record that a client has got a result."""
        if not request.fetched:
            self.handle(Fetched(request.id))

    # ---- effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Commit():
                self._journal.write(effect.kept, effect.dropped)
            case WorkerCall():
                self._begin(self._call(effect))
            case Settle():
                self._settle(effect.request)
            case ReleaseData():
                self._releases.put_nowait(effect)
            case ReleaseVersion():
                self._releases.put_nowait(effect.ref)
            case RemoveFolder():
                shutil.rmtree(self.folder / effect.folder, ignore_errors=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work whose failure ends the server."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._work.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _call(self, call: WorkerCall) -> None:
        event = await self._trainer.run(call)
        self.handle(event)
        if isinstance(event, WorkersGone):
            await self._take_over()

    async def _take_over(self) -> None:
        await self._trainer.take_over()
        if not self.state.own.published:  # in each life, because the stores of a run that was resumed are empty
            base = await self._trainer.publish_base()
            self.keep(base)
            self._sampler.begin(base.ref)
            await self._publish_saved()
            self.state.own.published = True
        self.handle(WorkersReady())

    async def _publish_saved(self) -> None:
        """Publish the weights that were saved for sampling, and that the stores do not have."""
        own = self.state.own
        for saved in own.unpublished():
            if own.checkpoints.get(saved.path) is not saved:  # deleted while another was published
                continue
            version = await self._trainer.publish_saved(saved, own.next_step())
            if version is None:
                continue
            self.keep(version)
            if own.checkpoints.get(saved.path) is saved:  # not deleted while it was published
                saved.version = version.id
                self.keep(saved)

    def _settle(self, name: str) -> None:
        request = self.state.requests[name]
        if request.kind == RequestKind.OPTIM_STEP and not request.error:
            self._write_row(request)
        if (event := self._waiting.pop(name, None)) is not None:
            event.set()

    def _write_row(self, request: TrainingRequest) -> None:
        """Append the metrics of an `optim_step` to those of its model."""
        folder = self.folder / model_folder(self.state.own.models[request.model])
        folder.mkdir(parents=True, exist_ok=True)
        row = {"time": request.done, "seq_id": request.seq, "lr": request.body["learning_rate"], **request.sums}
        with (folder / METRICS).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.handle(ClockTick())

    async def _release(self) -> None:
        """Release data and published weights, one after the other. What was not released when the server died is
        released by the next life."""
        while True:
            work = await self._releases.get()
            try:
                if isinstance(work, ReleaseData):
                    await self._scheduler.release(API, work.model, work.first, work.count)
                else:
                    await self._trainer.release_version(work)
            except RpcError as error:
                self._log.warning("not released", error=str(error))


def metrics(request: TrainingRequest) -> dict[str, float]:
    """Return the metrics of a `forward_backward` under the names that clients know, which say how they add up."""
    return {f"{name}:sum": value for name, value in request.sums.items()}
