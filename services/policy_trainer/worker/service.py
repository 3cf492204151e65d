"""The worker as an actor: runs the driver's calls one by one on the compute thread. The loop never computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from proto import messages
from proto.messages import BatchMeta, BatchPart, ErrorCode, TaskHandle
from proto.registry import Message
from services.policy_trainer.worker import samples
from services.policy_trainer.worker.lane import Lane
from shared import topology as topologies
from shared.actor.service import Service
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir
from shared.stages import PROXIMAL

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend_torch import TorchBackend
    from services.policy_trainer.worker.publish import Canaries

T = TypeVar("T")

FETCH_S = 60.0
PUT_S = 120.0
STORE = "batch-store/0"


class PolicyTrainerWorker(Service):
    """`python -m services.policy_trainer.worker`: owns the model; knows nothing of the algorithm."""

    NAME = "policy-trainer-worker"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.topology = topologies.load(run.topology)
        self.step = -1
        self.dirty = False
        self._lane = Lane()
        self._compute = ThreadPoolExecutor(1, "compute")
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._backend: TorchBackend
        self._canaries: Canaries
        self._data = DataClient(self.client)
        self._loaded = False
        self._pristine = True
        """The weights are those of the model directory, with fresh optimizer state."""
        self._running = asyncio.Lock()
        self._putting: asyncio.Future[Any] | None = None
        """Weights on their way into a store: no optimizer step before they are there."""
        self._saving: set[asyncio.Task[None]] = set()
        self._runners: dict[type[messages.WorkerRequest], Callable[[Any, Call], Awaitable[Message | Deferred]]] = {
            messages.InitModel: self._init_model,
            messages.LoadCheckpoint: self._load_checkpoint,
            messages.Forward: self._forward,
            messages.ForwardBackward: self._forward_backward,
            messages.OptimStep: self._optim_step,
            messages.Publish: self._publish,
            messages.SaveCheckpoint: self._save_checkpoint,
            messages.SaveModel: self._save_model,
        }
        for kind in self._runners:
            self.mailbox.handle(kind, self._queue)
        self.mailbox.handle(messages.GetWorkerState, self._state)

    # ---- life

    async def start(self) -> None:
        """Import torch and load the model: the driver's first call finds it there."""
        await self._on_compute_thread(self._load)
        self._loaded = True

    def _load(self) -> None:
        # imported on the compute thread, so that the mailbox answers during the seconds it takes
        from services.policy_trainer.worker.backend_torch import TorchBackend
        from services.policy_trainer.worker.publish import Canaries

        topology = self.topology
        options = topology.services.policy_trainer
        self._backend = TorchBackend(
            Path(topology.policy.model),
            topology.policy.dtype,
            topology.optimizer,
            max_tokens=options.max_tokens_per_micro_batch,
            threads=options.threads or 1,
        )
        self._canaries = Canaries(self._backend, topology.policy.dtype, topology.run.seed)

    async def serve(self) -> None:
        while True:
            request, call = await self._lane.next()
            epoch = self._lane.epoch
            async with self._running:
                try:
                    answer = await self._runners[type(request)](request, call)
                except Exception as error:
                    self._lane.fail(f"{type(request).__name__}: {error}"[:200], epoch=epoch)
                    self._refuse(request, call, error)
                else:
                    if isinstance(answer, Message):
                        call.reply(answer)

    async def drain(self) -> None:
        """A checkpoint being written is finished; a computation is not waited for."""
        if self._saving:
            await asyncio.wait(self._saving)
        self._data.close()
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False)

    def _refuse(self, request: Message, call: Call, error: Exception) -> None:
        if isinstance(error, RpcError):
            call.fail(error)
            return
        self.log.error("call failed", request=type(request).__name__, exc_info=error)
        text = f"{self.name}: {type(request).__name__} failed: {type(error).__name__}: {error}"
        call.fail(RpcError(ErrorCode.INTERNAL, text[:1000]))

    async def _on_compute_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    # ---- mailbox

    def _queue(self, request: Any, call: Call) -> Deferred:
        self._lane.add(request, call)
        return DEFERRED

    def _state(self, request: messages.GetWorkerState, _: Call) -> Awaitable[messages.WorkerState]:
        self._lane.take_over(request.driver)
        return self._settled()

    async def _settled(self) -> messages.WorkerState:
        """Where the worker stands once what runs has ended; gradients of an unfinished update are forgotten."""
        async with self._running:
            if self._loaded:
                await self._on_compute_thread(self._backend.drop_gradients)
            return messages.WorkerState(
                step=self.step, driver=self._lane.driver, order=self._lane.done, dirty=self.dirty
            )

    # ---- calls, in order

    async def _init_model(self, _: messages.InitModel, __: Call) -> Message:
        await self._weights_put()
        if not self._pristine:
            self.dirty = True
            await self._on_compute_thread(self._backend.restart)
            self._pristine = True
        return self._ready(0)

    async def _load_checkpoint(self, request: messages.LoadCheckpoint, _: Call) -> Message:
        from services.policy_trainer.worker import checkpoint

        await self._weights_put()
        folder = self.run.checkpoints

        def work() -> None:
            state = checkpoint.load(folder, request.step)
            self._pristine, self.dirty = False, True
            self._backend.load_state(state.weights, state.optimizer)

        await self._on_compute_thread(work)
        return self._ready(request.step)

    def _ready(self, step: int) -> messages.WorkerReady:
        self.step, self.dirty = step, False
        return messages.WorkerReady(step=step, parameters=self._backend.parameters)

    async def _forward(self, request: messages.Forward, _: Call) -> Message:
        began = time.perf_counter()
        tokens = samples.join(await self._fetch(request.batch, samples.SCORE_KEYS))
        flat = tokens.flat
        logprobs = await self._on_compute_thread(
            lambda: self._backend.logprobs(flat["token_ids"], flat["lengths"], flat["loss_mask"], request.temperature)
        )
        ends = tokens.tokens_of_task.cumsum()
        pieces = [logprobs[end - size : end] for end, size in zip(ends, tokens.tokens_of_task, strict=True)]
        await self._data.put(
            [
                TaskShards(task.task_id, task.fence, {request.key: piece})
                for task, piece in zip(request.batch.tasks, pieces, strict=True)
            ],
            store=STORE,
            deadline_s=PUT_S,
        )
        meta = BatchMeta(
            tasks=[
                TaskHandle(task.task_id, task.fence, task.samples, task.tokens, piece.nbytes, [0])
                for task, piece in zip(request.batch.tasks, pieces, strict=True)
            ],
            parts=[BatchPart(PROXIMAL.name, [request.key])],
            stores=[STORE],
        )
        return messages.ForwardDone(meta=meta, seconds=time.perf_counter() - began)

    async def _forward_backward(self, request: messages.ForwardBackward, _: Call) -> Message:
        began = time.perf_counter()
        keys = list(samples.LOSS_KEYS)
        keys += [samples.REF_KEY] if request.loss.kl_estimator else []
        keys += [samples.PROX_KEY] if request.loss.anchor == "proximal" else []
        tokens = samples.join(await self._fetch(request.batch, keys))
        counts = [task.samples for task in request.batch.tasks]

        def work() -> dict[str, float]:
            advantages = samples.spread(tokens, counts, request.advantages)
            weights = samples.spread(tokens, counts, request.weights)
            return self._backend.forward_backward(request.loss, tokens.flat, advantages, weights)

        sums = await self._on_compute_thread(work)
        return messages.ForwardBackwardDone(sums=sums, seconds=time.perf_counter() - began)

    async def _optim_step(self, request: messages.OptimStep, _: Call) -> Message:
        if request.step != self.step + 1:
            raise RpcError(
                ErrorCode.CONFLICT, f"optimizer step of step {request.step}: the worker stands at {self.step}"
            )
        await self._weights_put()
        began = time.perf_counter()
        was_dirty, self.dirty = self.dirty, True
        try:
            update = await self._on_compute_thread(lambda: self._backend.step(request.step))
        except RpcError:
            self.dirty = was_dirty  # refused before anything was changed
            raise
        self._pristine, self.dirty = False, not request.last
        if request.last:
            self.step = request.step
        return messages.OptimStepDone(grad_norm=update.grad_norm, lr=update.lr, seconds=time.perf_counter() - began)

    async def _publish(self, request: messages.Publish, call: Call) -> Deferred:
        """The canary runs in order; the bytes travel while the next gradient is computed."""
        from services.policy_trainer.worker.publish import put_weights

        self._must_stand_at(request.step, "publish")
        await self._weights_put()
        began = time.perf_counter()
        canary = await self._on_compute_thread(self._canaries.current)

        async def put() -> None:
            try:
                ref = await put_weights(
                    self._data,
                    self._backend,
                    self._canaries,
                    canary,
                    lineage=request.lineage,
                    step=request.step,
                    store=request.store,
                    fence=request.fence,
                )
            except Exception as error:
                # the weights are as they were: later calls may go on
                self._refuse(request, call, error)
            else:
                call.reply(messages.Published(ref=ref, seconds=time.perf_counter() - began))

        self._putting = asyncio.ensure_future(put())
        return DEFERRED

    async def _weights_put(self) -> None:
        """Wait until no weights are being read: they are about to change."""
        if self._putting is not None:
            await self._putting
            self._putting = None

    async def _save_checkpoint(self, request: messages.SaveCheckpoint, call: Call) -> Deferred:
        """State is copied in order; writing goes on beside the next step."""
        from services.policy_trainer.worker import checkpoint

        self._must_stand_at(request.step, "checkpoint")
        backend = self._backend
        state = await self._on_compute_thread(
            lambda: checkpoint.State(request.step, backend.weights_state(), backend.optimizer_state())
        )
        folder, keep_every = self.run.checkpoints, self.topology.checkpoint.keep_every

        def write() -> tuple[Path, list[int]]:
            path = checkpoint.save(folder, state, keep_last=request.keep_last, keep_every=keep_every)
            return path, checkpoint.steps(folder)

        async def save() -> None:
            began = time.perf_counter()
            try:
                path, kept = await asyncio.get_running_loop().run_in_executor(self._writer, write)
            except Exception as error:
                self._refuse(request, call, error)
            else:
                call.reply(messages.Saved(path=str(path), seconds=time.perf_counter() - began, kept=kept))

        task = asyncio.create_task(save())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        return DEFERRED

    async def _save_model(self, request: messages.SaveModel, _: Call) -> Message:
        from services.policy_trainer.worker.export import export

        began = time.perf_counter()
        source = Path(self.topology.policy.model)
        await self._on_compute_thread(lambda: export(self._backend.model, source, Path(request.path)))
        return messages.Saved(path=request.path, seconds=time.perf_counter() - began)

    def _must_stand_at(self, step: int, what: str) -> None:
        if self.step != step or self.dirty:
            raise RpcError(ErrorCode.CONFLICT, f"{what} of step {step}: the worker stands at {self.step}")

    async def _fetch(self, batch: BatchMeta, keys: tuple[str, ...] | list[str]) -> list[dict[str, Any]]:
        return await self._data.fetch(batch, list(keys), deadline_s=FETCH_S)
