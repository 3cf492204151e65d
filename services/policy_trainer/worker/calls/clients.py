"""Executes the calls to the models of a server's clients, one of which is on the device at a time.

A model's weights and optimizer state only change in calls that end with a snapshot in shared memory. Bringing in
another model therefore copies only the accumulated gradient to host memory, and loads the newest snapshot of the other
model with the gradient that it has accumulated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
from msgspec import structs

from proto.messages import (
    Ack,
    CloseModel,
    ErrorCode,
    ForwardBackwardDone,
    ForwardBackwardModel,
    ModelRequest,
    OpenModel,
    OptimStep,
    OptimStepDone,
    OptimStepModel,
    Publish,
    PublishModel,
    Saved,
    SaveState,
    WorkerReady,
    WorkerRequest,
)
from proto.registry import Message
from proto.tensors import Array
from services.policy_trainer.worker import checkpoint, given_loss, saved_model
from services.policy_trainer.worker.calls.results import put_results
from services.policy_trainer.worker.calls.state import StateCalls
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.given_loss import GivenLoss
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.samples import BatchTokens
from services.policy_trainer.worker.slots import Slots
from services.policy_trainer.worker.standing import Standing
from services.policy_trainer.worker.training_state import TrainingState
from shared.colocation.devices import PARTS
from shared.ranks.group import GroupEnded
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call, Deferred
from shared.stages import GIVEN, GIVEN_LOGPROBS

_GRADIENT = "own/gradient/"
"""Prefix of the gradient in `Loaded.state`."""
_LINEAGE = 0
"""Lineage of the snapshots of clients' models."""


class ClientCalls:
    """Runs the calls of clients' models, and those of the trained model as `others` says, but not both kinds.

    All ranks make the same calls in the same order and fail together, so that their models have the same standings.
    """

    def __init__(
        self,
        rank: Rank,
        loaded: Loaded,
        others: Mapping[type[WorkerRequest], Runner],
        states: StateCalls,
        *,
        several_hosts: bool,
    ) -> None:
        """`states` writes folders. `several_hosts` means that ranks on other hosts cannot read them."""
        self._rank, self._loaded, self._backend = rank, loaded, loaded.backend
        self._others, self._states, self._several_hosts = others, states, several_hosts

    @property
    def runners(self) -> dict[type[WorkerRequest], Runner]:
        own: dict[type[WorkerRequest], Runner] = {
            ForwardBackwardModel: self._forward_backward,
            OptimStepModel: self._optim_step,
            PublishModel: self._publish,
            SaveState: self._save,
        }
        return {
            **{kind: partial(self._of_trained, runner) for kind, runner in self._others.items()},
            **{kind: partial(self._of_client, runner) for kind, runner in own.items()},
            OpenModel: self._open,
            CloseModel: self._close,
        }

    async def _of_trained(self, runner: Runner, request: WorkerRequest, call: Call) -> Message | Deferred:
        if self._rank.standings.has_clients:
            text = f"{type(request).__name__} refused: these workers train the models of a server's clients"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; end the server first")
        return await runner(request, call)

    async def _of_client(self, runner: Runner, request: ModelRequest, call: Call) -> Message | Deferred:
        standings, model = self._rank.standings, request.model
        standing = standings.get(model)
        if standing is None:
            text = f"{type(request).__name__} of model {model}: open it first, it is not open"
            raise RpcError(ErrorCode.CONFLICT, text)
        if standings.resident != model:
            await self._bring_in(model, standing)
        try:
            return await runner(request, call)
        except GroupEnded:
            raise
        except Exception as error:
            await self._failed(request, standing, error)
            raise

    async def _failed(self, request: ModelRequest, standing: Standing, error: Exception) -> None:
        """Bring the model on the device back to a known state after a call has failed."""
        if standing.dirty:  # the failure interrupted an update: the snapshot before it is loaded next time
            standing.dirty, self._rank.standings.resident = False, 0
        elif isinstance(request, ForwardBackwardModel) and not request.forward_only:
            standing.failed = standing.failed or " ".join(str(error).split())[:300]
            await self._rank.drop_gradients()

    # ---- which model is on the device

    async def _bring_in(self, model: int, standing: Standing) -> None:
        """Replace the model on the device. Raises GroupEnded if this rank cannot, because the others may have."""
        rank = self._rank
        try:
            await self._put_away()
            slots = self._slots()
            state = await asyncio.to_thread(standing.snapshots.read, _LINEAGE, standing.step)

            def work() -> None:
                self._loaded.load_state(state | standing.gradient)
                slots.use(standing.adapter)

            await rank.on_compute_thread(work)
        except Exception as error:
            raise GroupEnded(f"model {model} cannot be brought in: {error}") from error
        standing.gradient = {}
        rank.standings.resident = model

    async def _put_away(self) -> None:
        """Keep the gradient of the model on the device, if there is one, so that another model can take its place."""
        rank = self._rank
        await rank.weights_settled()
        await rank.devices.backload(PARTS)
        if rank.standings.resident:
            standing = rank.standing

            def gradient() -> dict[str, torch.Tensor]:
                state = self._loaded.state(standing.step)
                return {name: state[name].to("cpu", copy=True) for name in state if name.startswith(_GRADIENT)}

            standing.gradient = await rank.on_compute_thread(gradient)
            rank.standings.resident = 0

    def _slots(self) -> Slots:
        slots = self._backend.slots
        if slots is None:
            text = f"backend {self._rank.model.settings.backend} cannot train the models of a server's clients"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; use torch")
        return slots

    # ---- opening and closing

    async def _open(self, request: OpenModel, _: Call) -> WorkerReady:
        rank, standings = self._rank, self._rank.standings
        before = standings.get(request.model)
        step = request.step if request.step >= 0 else 0 if before is None else before.step + 1
        standing = standings.new(request.model, request.adapter, step)
        standing.failed = request.failed
        changes = before is not None and request.step < 0

        async def prepared() -> dict[str, torch.Tensor] | TrainingState | None:
            if request.model < 1:
                raise RpcError(
                    ErrorCode.BAD_REQUEST, f"model {request.model}: the numbers of clients' models begin at 1"
                )
            slots = self._slots()
            if standings.trained.step >= 0:
                raise RpcError(ErrorCode.BAD_REQUEST, f"{rank.model.name} is in training; start a server for clients")
            slots.check(request.adapter)
            if request.snapshot:
                return await asyncio.to_thread(standing.snapshots.read, _LINEAGE, step)
            return await asyncio.to_thread(self._read, request)

        state = await rank.ready(request, prepared())
        await self._put_away()
        await rank.together("OpenModel", lambda: self._load(request, state))
        if before is not None and changes:
            standing.snapshots = before.snapshots  # the one before the change stays, as with an update
        if not request.snapshot:
            # A new model fills both files, so that no later snapshot needs more memory, which might then be lacking.
            keep = self._keep(standing, 1 if changes else 2)
            try:
                await self._agree(f"snapshots {request.driver:x}/{request.order}", keep)
            except RpcError:
                standings.close(request.model)  # and give back the room that was found
                raise
        if not changes:
            standing.snapshots.keep_only(_LINEAGE, step)
        standings.put(request.model, standing)
        return WorkerReady(step=step, parameters=self._backend.parameters)

    def _read(self, request: OpenModel) -> TrainingState | None:
        """Return what is in the request's folder, or None for a new model, and on a rank that cannot read it."""
        if not request.folder or (self._several_hosts and self._rank.place.rank != 0):
            return None
        base = self._backend.base
        name = "" if base is None else base.name
        return saved_model.load(Path(request.folder), request.adapter, name, with_optimizer=request.with_optimizer)

    def _load(self, request: OpenModel, state: dict[str, torch.Tensor] | TrainingState | None) -> None:
        """Load `state` on every rank. Raises RpcError(conflict) on all of them if it is that of another model."""
        slots = self._slots()
        if isinstance(state, dict):
            self._loaded.load_state(state)
        else:
            if request.folder and self._several_hosts:
                mine = None if state is None else SavedState(0, state.weights, state.optimizer)
                saved = checkpoint.broadcast(mine)
                state = TrainingState(saved.weights, saved.optimizer)
            whole = slots.first(request.adapter) if state is None else slots.padded(state, request.adapter)
            if whole is None:
                self._backend.restart()
            else:
                self._backend.load_state(whole)
            self._backend.fill_moments()
        slots.use(request.adapter)

    async def _keep(self, standing: Standing, times: int = 1) -> float:
        """Take a snapshot of the model on the device. Return its processor time. Raises RpcError(busy) if there is no
        room for it."""

        def work() -> float:
            began, state = time.thread_time(), self._loaded.state(standing.step)
            for _ in range(times):
                standing.snapshots.take(_LINEAGE, standing.step, state)
            return time.thread_time() - began

        try:
            return await self._rank.on_compute_thread(work)
        except OSError as error:
            text = f"no room in shared memory for the state of another model: {error}; close a model"
            raise RpcError(ErrorCode.BUSY, text) from error

    async def _agree(self, name: str, work: Awaitable[object]) -> None:
        """Await `work` on every rank. Raises RpcError on all of them if it fails on one."""
        failure = ""
        try:
            await work
        except RpcError as error:
            failure = str(error)
            raise
        finally:
            await self._rank.meet(name, failure)

    async def _close(self, request: CloseModel, _: Call) -> Ack:
        await self._rank.ready(request, self._rank.weights_settled())
        self._rank.standings.close(request.model)
        return Ack()

    # ---- training

    async def _forward_backward(self, request: ForwardBackwardModel, _: Call) -> ForwardBackwardDone:
        began, rank, standing = time.perf_counter(), self._rank, self._rank.standing
        names = [task.task_id for task in request.batch.tasks]

        async def bind() -> tuple[BatchTokens, GivenLoss]:
            given_loss.check_spec(request.loss)
            tokens = await rank.reader.tokens(request)
            given_loss.check_vocabulary(tokens, names, self._backend.vocab_size)
            device = rank.model.settings.device
            return tokens, await rank.on_compute_thread(lambda: GivenLoss(request.loss, tokens.flat, device))

        tokens, loss = await rank.ready(request, bind())
        sequences, temperature = given_loss.sequences_of(tokens), request.loss.temperature

        def work() -> tuple[dict[str, float], Array]:
            sums = self._backend.forward_backward(
                sequences, temperature, loss, entropy="none", backward=not request.forward_only
            )
            return sums, loss.logprobs()

        sums, logprobs = await rank.together("ForwardBackward", work)
        if not request.forward_only:
            standing.accumulated += names
        rank.reader.end_step()
        if request.repeated:
            return ForwardBackwardDone(sums=sums, seconds=time.perf_counter() - began)
        ends = tokens.targets_of_task.cumsum()
        pieces = [
            {GIVEN_LOGPROBS: logprobs[end - size : end]} for end, size in zip(ends, tokens.targets_of_task, strict=True)
        ]
        meta = await put_results(rank, request, GIVEN.name, (GIVEN_LOGPROBS,), pieces)
        return ForwardBackwardDone(sums=sums, seconds=time.perf_counter() - began, meta=meta)

    async def _optim_step(self, request: OptimStepModel, call: Call) -> OptimStepDone:
        rank, standing = self._rank, self._rank.standing
        failed, standing.failed = standing.failed, ""
        if failed:
            await rank.drop_gradients()
            text = f"no step taken, weights unchanged: a forward_backward since the last step has failed ({failed})"
            raise RpcError(ErrorCode.BAD_DATA, f"{text}; its gradient and those of the others were dropped")
        if request.optimizer.eps <= 0:
            text = f"eps is {request.optimizer.eps}: it must be above 0, because some gradients of an adapter are 0"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        numbers = {"driver": request.driver, "order": request.order, "step": standing.step + 1}
        update = OptimStep(**numbers, last=True, optimizer=request.optimizer)
        done = await self._others[OptimStep](update, call)
        try:
            snapshot_s = await self._keep(standing)
        except RpcError as error:  # the room has been there since the model was opened
            raise GroupEnded(str(error)) from error
        return structs.replace(cast(OptimStepDone, done), step=standing.step, snapshot_s=snapshot_s)

    # ---- weights

    async def _publish(self, request: PublishModel, call: Call) -> Message | Deferred:
        numbers = {"driver": request.driver, "order": request.order, "fence": request.fence}
        version = Publish(**numbers, lineage=request.model, step=self._rank.standing.step, store=request.store)
        return await self._others[Publish](version, call)

    async def _save(self, request: SaveState, call: Call) -> Saved | Deferred:
        """Gather the state in call order and write it during later calls."""
        rank, standing = self._rank, self._rank.standing
        await rank.ready(request, asyncio.sleep(0))
        whole = await rank.together("SaveState", self._backend.state)
        if rank.place.rank != 0:
            return Saved(path="", seconds=0.0)
        base = self._backend.base
        state = self._slots().trimmed(whole, standing.adapter)
        write = partial(
            saved_model.save,
            Path(request.path),
            rank.model.folder,
            rank.model.dtype,
            "" if base is None else base.name,
            standing.step,
            standing.adapter,
            state,
            with_optimizer=request.with_optimizer,
        )
        return self._states.write(request, call, write)
