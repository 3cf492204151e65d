"""Executes the driver's calls on one rank: prepare, meet the other ranks, compute, answer.

A call can fail on a single rank only before the ranks have met. After that it fails on all of them, or the group ends.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from proto import messages
from proto.ids import REVISION
from proto.messages import BatchMeta, BatchPart, ErrorCode, TaskHandle, WorkerRequest
from proto.registry import Message
from proto.tensors import Array
from services.policy_trainer.loss_spec import ADVANTAGES, WEIGHTS
from services.policy_trainer.worker import samples
from services.policy_trainer.worker.batch_reader import BatchReader
from services.policy_trainer.worker.checkpoint_writer import CheckpointWriter
from services.policy_trainer.worker.colocation.devices import Devices
from services.policy_trainer.worker.colocation.residency import NEEDS, Part, parts_named
from services.policy_trainer.worker.sample_records import SampleRecords
from services.policy_trainer.worker.snapshot_keeper import SnapshotKeeper
from services.policy_trainer.worker.snapshots import Snapshots
from shared.actor.own_store import own_store
from shared.actor.service import Service
from shared.dataplane.client import DataClient, TaskShards
from shared.ranks.group import Group, GroupEnded
from shared.ranks.layout import Place
from shared.ranks.meeting import Meeting
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.rundir import RunDir, service_name
from shared.samples.choice import Choice
from shared.stages import PROXIMAL
from shared.topology import Topology

if TYPE_CHECKING:
    from services.policy_trainer.worker.backend import Backend, OptimizerUpdate
    from services.policy_trainer.worker.losses.policy import PolicyLoss
    from services.policy_trainer.worker.weights.earlier import EarlierVersions
    from services.policy_trainer.worker.weights.publish import Canaries
    from services.policy_trainer.worker.weights.staging import Staging

T = TypeVar("T")

PUT_S = 120.0


class Calls:
    """The state of one rank between calls: model, step, shards, unfinished writes. Use it only on the event loop."""

    def __init__(
        self,
        run: RunDir,
        topology: Topology,
        place: Place,
        group: Group,
        data: DataClient,
        compute: ThreadPoolExecutor,
        service: Service,
    ) -> None:
        """`compute` is the one thread that owns the model, the device and the collectives. `service` takes turns on
        devices."""
        self.step = -1
        self.dirty = False
        self._run = run
        self._topology = topology
        self._place = place
        self._group = group
        self._data = data
        self._compute = compute
        self._writer = CheckpointWriter(run.checkpoints, topology.checkpoint.keep_every)
        self._backend: Backend
        self._canaries: Canaries
        self._staging: Staging
        self._earlier: EarlierVersions
        self._meeting: Meeting
        self._store = ""
        """Name of the store on this rank's host for its log-probs, or "" until the first log-probs are put."""
        self._own_loss: PolicyLoss | None = None
        self._pristine = True
        """Whether the weights are those of the model directory and the optimizer state is fresh."""
        self._service = service
        self.devices = Devices(
            lambda work: self._together("move", work),
            self._weights_put,
            shows_parameters=topology.services.rollout.weights == "ipc",
        )
        self.on_published: Callable[[messages.WeightsRef, Mapping[str, Any]], None] = lambda ref, weights: None
        """Callback on rank 0 that receives each version that was put, and its weights, before the driver is answered.
        The weights do not change until `on_changing` is called."""
        self.on_changing: Callable[[], None] = lambda: None
        """Callback that returns once no sender is reading published weights on the device."""
        self.progress = 0
        """The number of micro-batches plus the number of calls that the compute thread has finished."""
        self.reader = BatchReader(
            data,
            patience_s=topology.services.policy_trainer.collective_s / 2,
            on_wait=self._waited,
        )
        self._putting: asyncio.Future[Any] | None = None
        """The pending put of weights into a store. No optimizer step begins before it ends."""
        kept = topology.checkpoint.memory_every is not None
        self._records = SampleRecords(Choice.of(topology), data, self._own_store)
        self.snapshots = SnapshotKeeper(Snapshots(run.shm / "trainer", place) if kept else None)
        self._accumulated: list[str] = []
        """Tasks of this data-parallel rank whose gradients are waiting for the next update."""
        self._log = structlog.get_logger("policy-trainer-worker")

    def _waited(self, why: str, seconds: float) -> None:
        """Report that shards could not be read."""
        self._service.telemetry.emit("waiting", {"for": "shards", "why": why[:200]})
        self._service.telemetry.span("shards", seconds, of="batch-store")

    # ---- life

    async def load(self, meeting: Meeting) -> None:
        """Open the process group at `meeting` and load the model, on the compute thread.

        Raises RpcError, GroupEnded.
        """
        self._meeting = meeting
        if self._service.NAME in self._topology.colocated_services:
            self.devices.share(self._service)
        await self.devices.acquire_room()
        await self._together("load", self._load)
        self.devices.loaded(self._backend)

    def _load(self) -> None:
        # The imports run on the compute thread, so that the mailbox keeps answering during the seconds that they take.
        from services.policy_trainer.worker.losses.own import own_policy_loss
        from services.policy_trainer.worker.start import make_backend
        from services.policy_trainer.worker.weights.earlier import EarlierVersions
        from services.policy_trainer.worker.weights.publish import Canaries
        from services.policy_trainer.worker.weights.staging import Staging
        from shared.model.load import require_deterministic_algorithms

        deterministic = self._topology.run.deterministic
        if deterministic:
            require_deterministic_algorithms()
        self._earlier = EarlierVersions(self._topology.staleness if deterministic else 0)
        self._backend = make_backend(self._run, self._topology, self._place, self._meeting)
        self._backend.called.register_forward_hook(lambda *_: self._advance())
        self._own_loss = own_policy_loss(self._topology.algorithm.loss)
        policy = self._topology.policy
        rollout = self._topology.services.rollout
        # An embedded engine on a CPU uses the mapped arrays as its parameters and can prove this without digests.
        mapped = rollout.engine == "transformers" and rollout.device == "cpu" and rollout.weights == "shards"
        self._canaries = Canaries(
            self._backend, Path(policy.model), policy.dtype, self._topology.run.seed, with_digests=not mapped
        )
        self._staging = Staging()

    async def close(self) -> None:
        """Wait for unfinished checkpoints and release all resources."""
        await self._writer.close()
        await self._records.close()
        self.reader.forget_prefetched()
        shutil.rmtree(self._run.path / "offloaded" / f"rank-{self._place.rank}", ignore_errors=True)
        self._data.close()

    def _advance(self) -> None:
        self.progress += 1

    async def drop_gradients(self) -> None:
        """Drop the accumulated gradients and the list of their tasks."""
        self._accumulated = []
        await self.devices.drop_gradients()

    async def run(self, request: WorkerRequest, call: Call) -> Message | Deferred:
        """Run `request` and return its answer, or DEFERRED if it is answered later. Raises RpcError, GroupEnded."""
        return await RUNNERS[type(request)](self, request, call)

    def refuse(self, request: Message, call: Call, error: Exception) -> None:
        """Answer `call` with `error`. Unexpected exceptions are also logged with their traceback."""
        if isinstance(error, RpcError):
            call.fail(error)
            return
        self._log.error("call failed", request=type(request).__name__, exc_info=error)
        text = f"{service_name('policy-trainer-worker', self._place.rank)}: {type(request).__name__} failed: "
        call.fail(RpcError(ErrorCode.INTERNAL, f"{text}{type(error).__name__}: {error}"[:1000]))

    # ---- threads and ranks

    async def _on_compute_thread(self, work: Callable[[], T]) -> T:
        def counted() -> T:
            result = work()
            self._advance()
            return result

        return await asyncio.get_running_loop().run_in_executor(self._compute, counted)

    async def _ready(self, request: WorkerRequest, preparation: Awaitable[T]) -> T:
        """Return the result of `preparation` once all ranks are prepared and the parts for the call are on the device.

        Raises RpcError on all ranks if the preparation of any rank failed.
        """
        name = f"{type(request).__name__} {request.driver:x}/{request.order}"
        try:
            prepared = await preparation
        except RpcError as error:
            await self._group.meet(name, str(error))
            raise
        await self._group.meet(name)
        await self.devices.backload(self._needs(request))
        return prepared

    def _needs(self, request: WorkerRequest) -> frozenset[Part]:
        if isinstance(request, messages.InitModel) and self._pristine:  # only deterministic mode reads the weights
            return NEEDS[messages.Forward] if self._topology.run.deterministic else frozenset()
        return NEEDS[type(request)]

    async def _together(self, name: str, work: Callable[[], T]) -> T:
        """Run the collective `work` on every rank. If `work` raises RpcError, it does so on all ranks (`Backend`)."""
        return await self._group.together(name, self._on_compute_thread(work))

    # ---- calls, in order

    async def _init_model(self, request: messages.InitModel, _: Call) -> Message:
        self.reader.end_step()
        await self._ready(request, self._weights_put())
        if not self._pristine:
            self.dirty = True
            await self._together("InitModel", self._backend.restart)
            self._pristine = True
            self.devices.loaded_anew()
        await self._together("InitModel", lambda: self._begin_at(0))
        return self._ready_at(0)

    async def _load_checkpoint(self, request: messages.LoadCheckpoint, _: Call) -> Message:
        from services.policy_trainer.worker import checkpoint
        from services.policy_trainer.worker.backend import TrainingState
        from services.policy_trainer.worker.checkpoint_broadcast import from_rank_0
        from services.policy_trainer.worker.rank_state import load_rank_state

        async def read() -> Callable[[], None]:
            await self._weights_put()
            if request.snapshot_lineage >= 0:
                state = await asyncio.to_thread(self.snapshots.read, request.snapshot_lineage, request.step)
                return lambda: load_rank_state(state, self._backend, self._earlier, self._canaries)
            several_hosts = bool(self._meeting.store)
            reads = self._place.rank == 0 or not several_hosts
            mine = await asyncio.to_thread(checkpoint.load, self._run.checkpoints, request.step) if reads else None

            def load() -> None:
                saved = from_rank_0(mine) if mine is None or several_hosts else mine
                self._backend.load_state(TrainingState(saved.weights, saved.optimizer))
                self._earlier.restore(saved.earlier, self._canaries)

            return load

        self.reader.end_step()
        load = await self._ready(request, read())

        def work() -> None:
            self._pristine, self.dirty = False, True
            load()
            self._begin_at(request.step, request.snapshot_lineage)

        await self._together("LoadCheckpoint", work)
        self.devices.loaded_anew()
        return self._ready_at(request.step)

    def _begin_at(self, step: int, lineage: int = -1) -> None:
        """Begin a sequence of steps at `step`. Discard all snapshots except the loaded one, if any."""
        self._record(step)
        self.snapshots.keep_only(lineage, step)

    def _record(self, step: int) -> None:
        """Keep this version in deterministic mode. Every rank calls this as part of a collective."""
        if self._topology.run.deterministic:
            self._earlier.record(step, self._backend.weights(), self._canaries.current())

    def _ready_at(self, step: int) -> messages.WorkerReady:
        self.step, self.dirty = step, False
        return messages.WorkerReady(step=step, parameters=self._backend.parameters)

    async def _forward(self, request: messages.Forward, _: Call) -> Message:
        began = time.perf_counter()

        async def known() -> samples.BatchTokens:
            if request.keys != [samples.PROX_KEY]:
                wanted = ", ".join(request.keys) or "nothing"
                raise RpcError(ErrorCode.BAD_REQUEST, f"forward for {wanted}: only {samples.PROX_KEY} can be computed")
            return await self.reader.tokens(request)

        tokens = await self._ready(request, known())
        sequences, temperature = _sequences(tokens), self._topology.sampling.temperature
        logprobs = await self._together("Forward", lambda: self._backend.forward(sequences, temperature))
        ends = tokens.tokens_of_task.cumsum()
        pieces = [logprobs[end - size : end] for end, size in zip(ends, tokens.tokens_of_task, strict=True)]
        named = list(zip(request.batch.tasks, pieces, strict=True)) if self._place.leads else []
        # The key is unique to this call: an earlier life may have put different bits for these tasks and fences.
        key = f"{samples.PROX_KEY}{REVISION}{request.driver:x}-{request.order}"
        if named:
            shards = [TaskShards(task.task_id, task.fence, {key: piece}) for task, piece in named]
            await self._data.put(shards, store=await self._own_store(), deadline_s=PUT_S)
        handles = [
            TaskHandle(task.task_id, task.fence, task.samples, task.tokens, piece.nbytes, [0]) for task, piece in named
        ]
        meta = BatchMeta(tasks=handles, parts=[BatchPart(PROXIMAL.name, [key])], stores=[self._store])
        return messages.ForwardDone(meta=meta, seconds=time.perf_counter() - began)

    async def _own_store(self) -> str:
        self._store = self._store or await own_store(self._service)
        return self._store

    async def _forward_backward(self, request: messages.ForwardBackward, _: Call) -> Message:
        from services.policy_trainer.worker.batch_loss import BatchLoss

        began = time.perf_counter()
        recorded = self._records.wanted(request.batch, self.step) if self._place.leads else []
        # With cp, this rank computes only its part of each sequence.
        keeps = bool(recorded) and request.loss.anchor != "proximal" and self._place.layout.cp == 1

        async def bind() -> tuple[samples.BatchTokens, BatchLoss]:
            tokens = await self.reader.tokens(request)
            counts = [task.samples for task in request.batch.tasks]

            def spread() -> BatchLoss:
                advantages = samples.spread(tokens, counts, _scalar(request.batch, ADVANTAGES))
                weights = samples.spread(tokens, counts, _scalar(request.batch, WEIGHTS))
                tokens.flat["loss_mask"] = samples.trained(tokens.flat["loss_mask"], weights)
                device = self._topology.services.policy_trainer.device
                # With anchor rollout the trainer's log-probs are current; after an update they belong to no version.
                version = -1 if self.dirty and request.loss.anchor == "rollout" else self.step
                return BatchLoss(
                    request.loss, tokens.flat, advantages, weights, device, self._own_loss, version, keeps=keeps
                )

            return tokens, await self._on_compute_thread(spread)

        tokens, loss = await self._ready(request, bind())
        sequences, temperature = _sequences(tokens), request.loss.temperature

        def work() -> dict[str, float]:
            return self._backend.forward_backward(sequences, temperature, loss, entropy=loss.entropy)

        sums = await self._together("ForwardBackward", work)
        if recorded:
            self._records.put(request.batch, recorded, tokens, loss)
        self._accumulated += [task.task_id for task in request.batch.tasks]
        return messages.ForwardBackwardDone(sums=sums, seconds=time.perf_counter() - began)

    async def _optim_step(self, request: messages.OptimStep, _: Call) -> Message:
        async def may_change() -> None:
            if request.step != self.step + 1:
                raise RpcError(
                    ErrorCode.CONFLICT,
                    f"cannot take an optimizer step for step {request.step}: the worker is at step {self.step}",
                )
            await self._weights_put()

        await self._ready(request, may_change())
        began = time.perf_counter()
        was_dirty, self.dirty = self.dirty, True
        try:
            update = await self._together("OptimStep", lambda: self._update(request))
        except GroupEnded:
            raise
        except RpcError as error:
            self.dirty = was_dirty  # the step was refused before anything changed
            named, self._accumulated = self._accumulated, []
            some = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
            raise RpcError(error.code, f"{error}; its tasks: {some}", names=named) from None
        self._accumulated = []
        self._pristine, self.dirty = False, not request.last
        if request.last:
            self.step = request.step
            self.reader.end_step()
        seconds, snapshot_s = time.perf_counter() - began, 0.0
        if request.last and request.snapshot_lineage >= 0:

            def keep() -> float:
                from services.policy_trainer.worker.rank_state import rank_state

                state = partial(rank_state, self._backend, self._earlier, request.step)
                return self.snapshots.take(request.snapshot_lineage, request.step, state)

            snapshot_s = await self._on_compute_thread(keep)
        return messages.OptimStepDone(grad_norm=update.grad_norm, lr=update.lr, seconds=seconds, snapshot_s=snapshot_s)

    async def _skip_update(self, request: messages.SkipUpdate, _: Call) -> Message:
        async def may_count() -> None:
            if request.step != self.step + 1:
                raise RpcError(
                    ErrorCode.CONFLICT,
                    f"cannot skip the update of step {request.step}: the worker is at step {self.step}",
                )

        await self._ready(request, may_count())

        def work() -> None:
            self._backend.drop_gradients()
            if request.last:
                self._record(request.step)

        await self._together("SkipUpdate", work)
        self._accumulated = []
        if request.last:
            self.reader.end_step()
            return self._ready_at(request.step)
        return messages.WorkerReady(step=self.step, parameters=self._backend.parameters)

    def _update(self, request: messages.OptimStep) -> OptimizerUpdate:
        update = self._backend.step(request.step)
        if request.last:
            self._record(request.step)
        return update

    async def _publish(self, request: messages.Publish, call: Call) -> Message | Deferred:
        """Gather the weights and run the canary in call order. Send the bytes while the canary and the next gradient
        are computed."""
        from services.policy_trainer.worker.weights.publish import put_and_digested, put_weights, weights_ref

        earlier = request.step < self.step and self._topology.run.deterministic and not self.dirty

        async def settled() -> None:
            if not earlier:
                self._require_step(request.step, "publish")
            elif self._place.rank == 0 and self._earlier.get(request.step) is None:
                raise RpcError(
                    ErrorCode.CONFLICT, f"version {request.step} is not kept; the worker is at step {self.step}"
                )
            await self._weights_put()

        await self._ready(request, settled())
        began = time.perf_counter()
        version = self._earlier.get(request.step) if earlier else None
        if version is not None:
            weights = version.weights
        elif not earlier:
            weights = await self._together("Publish", self._backend.weights)
        leads = self._place.rank == 0
        put = [asyncio.ensure_future(put_weights(self._data, weights, request, self._staging))] if leads else []
        digests = [asyncio.ensure_future(asyncio.to_thread(self._canaries.digests, weights))] if leads else []
        try:
            if version is not None:
                canary = version.canary
            elif not earlier:
                canary = await self._together("Publish", self._canaries.current)
        except BaseException:
            if leads:
                await asyncio.wait([*put, *digests])
            raise
        if not put:
            return messages.Published(seconds=time.perf_counter() - began)

        async def answer() -> None:
            try:
                receipt, found = await put_and_digested(put[0], digests[0])
                ref = weights_ref(receipt, self._canaries, canary, found, request)
            except Exception as error:
                # The weights have not changed, so later calls may proceed.
                self.refuse(request, call, error)
            else:
                self.on_published(ref, weights)
                call.reply(messages.Published(ref=ref, seconds=time.perf_counter() - began))

        self._putting = asyncio.ensure_future(answer())
        return DEFERRED

    async def _weights_put(self) -> None:
        """Wait until weights are no longer being read, so that they can be changed."""
        if self._putting is not None:
            await self._putting
            self._putting = None
        self.on_changing()

    async def _save_checkpoint(self, request: messages.SaveCheckpoint, call: Call) -> Message | Deferred:
        """Gather the state in call order and write it during the next step."""
        from services.policy_trainer.worker.checkpoint import SavedState

        async def settled() -> None:
            self._require_step(request.step, "checkpoint")

        await self._ready(request, settled())
        state = await self._together("SaveCheckpoint", self._backend.state)
        if self._place.rank != 0:
            return messages.Saved(path="", seconds=0.0)
        earlier = self._earlier.tensors(request.step)
        saved = SavedState(request.step, state.weights, state.optimizer, earlier, at_stop=request.at_stop)
        self._writer.begin(saved, request.keep_last, request.keep, call.reply, partial(self.refuse, request, call))
        return DEFERRED

    async def _save_model(self, request: messages.SaveModel, _: Call) -> Message:
        from services.policy_trainer.worker.export import export

        began = time.perf_counter()
        await self._ready(request, asyncio.sleep(0))
        source = Path(self._topology.policy.model)
        await self._together("SaveModel", lambda: export(self._backend, source, Path(request.path)))
        return messages.Saved(path=request.path, seconds=time.perf_counter() - began)

    async def _move(self, request: messages.Move, _: Call) -> Message:
        began = time.perf_counter()

        async def named() -> frozenset[Part]:
            if request.to not in ("host", "device"):
                raise RpcError(ErrorCode.BAD_REQUEST, f"move to {request.to!r}: use host or device")
            await self._weights_put()
            return parts_named(request.parts)

        parts = await self._ready(request, named())
        away = request.to == "host"
        nbytes = await (self.devices.offload(parts) if away else self.devices.backload(parts))
        return messages.Moved(nbytes=nbytes, seconds=time.perf_counter() - began)

    def _require_step(self, step: int, what: str) -> None:
        if self.step != step or self.dirty:
            changed = ", but has changed its weights since" if self.dirty else ""
            raise RpcError(ErrorCode.CONFLICT, f"cannot {what} step {step}: the worker is at step {self.step}{changed}")


def _sequences(tokens: samples.BatchTokens) -> Any:
    from services.policy_trainer.worker.backend import Sequences

    return Sequences(tokens.flat["token_ids"], tokens.flat["lengths"], tokens.flat["loss_mask"])


def _scalar(batch: BatchMeta, name: str) -> Array:
    if name not in batch.scalars:
        known = ", ".join(sorted(batch.scalars)) or "none"
        raise RpcError(ErrorCode.BAD_REQUEST, f"the batch has no per-sample {name} (its scalars: {known}); add them")
    return batch.scalars[name]


Runner = Callable[[Calls, Any, Call], Awaitable[Message | Deferred]]
RUNNERS: Mapping[type[WorkerRequest], Runner] = MappingProxyType(
    {
        messages.InitModel: Calls._init_model,
        messages.LoadCheckpoint: Calls._load_checkpoint,
        messages.Forward: Calls._forward,
        messages.ForwardBackward: Calls._forward_backward,
        messages.OptimStep: Calls._optim_step,
        messages.SkipUpdate: Calls._skip_update,
        messages.Publish: Calls._publish,
        messages.SaveCheckpoint: Calls._save_checkpoint,
        messages.SaveModel: Calls._save_model,
        messages.Move: Calls._move,
    }
)
