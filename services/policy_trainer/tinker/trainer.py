"""Carries out the calls of the state machine: what each means for the workers, the stores and the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from proto.messages import AdamW, AdapterSpec, ErrorCode, WeightsRef
from services.policy_trainer.dispatch import WorkersLost
from services.policy_trainer.models import Models
from services.policy_trainer.sampling.sampler import Sampler
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.tinker.belongings import Belongings
from services.policy_trainer.tinker.bodies import weights_kind
from services.policy_trainer.tinker.errors import Category
from services.policy_trainer.tinker.events import CallDone, CallRefused, Step, WorkerCall, WorkersGone
from services.policy_trainer.tinker.records import (
    BASE_NUMBER,
    Adapter,
    Model,
    RequestKind,
    SavedWeights,
    TrainingRequest,
    Version,
)
from shared.batch import Batch
from shared.rpc.errors import RpcError
from shared.stages import WEIGHTS
from shared.topology import TRAINER_STORE

ALPHA = 32.0
"""What every adapter's product is multiplied by, divided by its rank."""
NOTHING = AdapterSpec(rank=1, alpha=ALPHA, seed=0, groups=["attention"])
"""The smallest adapter."""
ALL_WEIGHTS = AdapterSpec(rank=0, alpha=ALPHA, seed=0, groups=[])
PARKED = "parked"
"""Name of the folder in which the state of a parked model is."""
ATTEMPTS = 3
"""Maximum number of times that saved weights are published again after workers were lost."""
AGAIN_S = 1.0
"""Pause, in seconds, before workers that were lost are taken over again."""
_OF_USER = (ErrorCode.BAD_DATA, ErrorCode.BAD_REQUEST)


class Trainer:
    """The workers, as the state machine sees them."""

    def __init__(
        self,
        models: Models,
        scheduler: SchedulerCalls,
        sampler: Sampler,
        own: Belongings,
        run: Path,
        *,
        full_training: bool,
    ) -> None:
        """`own` is read only. `run` is the run directory."""
        self._models = models
        self._scheduler = scheduler
        self._sampler = sampler
        self._own = own
        self._run = run
        self._base = ALL_WEIGHTS if full_training else NOTHING
        self._log = structlog.get_logger("server")

    async def take_over(self) -> None:
        """Take control of the workers, which may be starting, and free the snapshots of models that should have none.

        Raises RpcError(conflict) if another server runs.
        """
        while True:
            try:
                held = await self._models.take_over((await self._scheduler.run_info()).drivers)
                trained = {one.number for one in self._own.models.values() if not (one.parked or one.closed)}
                for number in held.keys() - trained:
                    await self._models.close_model(number)
            except WorkersLost as error:
                self._log.warning("workers lost, taking over again", error=str(error))
                await asyncio.sleep(AGAIN_S)  # only paces the attempts
            else:
                return

    async def publish_base(self) -> Version:
        """Publish an adapter that changes nothing, because its B is zero, or all weights of the base if they are what
        clients train. An engine that loads it proves the base."""
        while True:
            try:
                return await self._published(0, lambda: self._models.open_model(BASE_NUMBER, self._base))
            except WorkersLost as error:
                self._log.warning("workers lost, taking over again", error=str(error))
                await self.take_over()

    async def publish_saved(self, saved: SavedWeights, step: int) -> Version | None:
        """Publish saved weights as version `step` of no client's model, or return None if that cannot be done. Raises
        RpcError(conflict) if another server runs."""
        adapter, folder = adapter_spec(saved.adapter), self._run / saved.folder
        load = self._models.load
        for _ in range(ATTEMPTS):
            try:
                return await self._published(
                    step, lambda: load(BASE_NUMBER, adapter, folder, with_optimizer=False, step=step)
                )
            except RpcError as error:
                if _is_taken_over(error):
                    raise
                self._log.warning("saved weights not published", path=saved.path, error=str(error))
                await self.take_over()  # which also closes the model
                if not isinstance(error, WorkersLost):
                    break
        return None

    async def _published(self, step: int, opened: Callable[[], Awaitable[int]]) -> Version:
        await self._scheduler.hold(WEIGHTS, BASE_NUMBER, step, 1)
        await opened()
        ref = await self._models.publish(BASE_NUMBER, store=TRAINER_STORE)
        await self._models.close_model(BASE_NUMBER)
        return Version(model=BASE_NUMBER, step=step, ref=ref)

    async def run(self, call: WorkerCall) -> CallDone | CallRefused | WorkersGone:
        """Carry out a call. Raises RpcError(conflict) if another server runs."""
        try:
            return await self._carried_out(call, self._own.models[call.model])
        except WorkersLost as error:
            self._log.warning("workers lost", error=str(error))
            return WorkersGone()
        except RpcError as error:
            if _is_taken_over(error):
                raise
            category = Category.USER if error.code in _OF_USER else Category.SERVER
            self._log.info("call refused", step=call.step, model=call.model, error=str(error))
            return CallRefused(call, str(error), category)

    async def _carried_out(self, call: WorkerCall, model: Model) -> CallDone:
        match call.step:
            case Step.OPEN:
                await self._open(model)
                return CallDone(call)
            case Step.PARK:
                await self._models.save(model.number, self._parked(model), with_optimizer=True)
                await self._models.close_model(model.number)
                return CallDone(call)
            case Step.REPLAY | Step.RUN:
                return await self._request(call, model, call.asked)

    async def _open(self, model: Model) -> None:
        number, adapter = model.number, adapter_spec(model.adapter)
        if model.parked:
            await self._models.load(number, adapter, self._parked(model), with_optimizer=True, step=model.steps)
        elif model.steps == 0:
            await self._begin(model)
        else:
            await self._models.resume(number, adapter, model.steps)

    async def _begin(self, model: Model) -> None:
        """Give a model the state with which it began."""
        number, adapter = model.number, adapter_spec(model.adapter)
        if model.origin:
            folder = self._run / model.origin
            await self._models.load(number, adapter, folder, with_optimizer=model.origin_optimizer, step=0)
        else:
            await self._models.open_model(number, adapter)

    async def _request(self, call: WorkerCall, model: Model, request: TrainingRequest) -> CallDone:
        number, body = model.number, request.body
        match request.kind:
            case RequestKind.CREATE:
                await self._begin(model)
                return CallDone(call)
            case RequestKind.FORWARD | RequestKind.FORWARD_BACKWARD:
                if request.meta is None or request.loss is None:
                    raise RpcError(ErrorCode.INTERNAL, f"request {request.id} has no data")
                batch = Batch(request.meta).take(range(*call.piece))
                done = await self._models.forward_backward(
                    number,
                    batch,
                    request.loss,
                    forward_only=call.forward_only,
                    repeated=call.step == Step.REPLAY,  # the answered log-probs may not have been fetched yet
                )
                return CallDone(call, sums=dict(done.sums), part=done.meta)
            case RequestKind.OPTIM_STEP:
                stepped = await self._models.optim_step(number, adamw(body))
                return CallDone(call, sums={"grad_norm": stepped.grad_norm, "step": float(stepped.step)})
            case RequestKind.LOAD:
                folder = self._run / body["folder"]
                adapter = adapter_spec(model.adapter)
                await self._models.load(number, adapter, folder, with_optimizer=body["optimizer"])
                return CallDone(call)
            case RequestKind.SAVE:
                saved = await self._models.save(number, self._run / body["folder"], with_optimizer=True)
                return CallDone(call, nbytes=folder_bytes(Path(saved.path)))
            case RequestKind.SAVE_SAMPLER:
                nbytes = 0
                if "folder" in body:
                    saved = await self._models.save(number, self._run / body["folder"], with_optimizer=False)
                    nbytes = folder_bytes(Path(saved.path))
                return CallDone(call, ref=await self._publish(model), nbytes=nbytes)
            case RequestKind.UNLOAD:
                await self._models.close_model(number)
                return CallDone(call)

    async def _publish(self, model: Model) -> WeightsRef:
        """Publish the present weights of a model. An engine that has a place for them proves them now, and any other
        before its first sample."""
        version = self._own.versions.get(f"{model.number}/{model.steps}")
        if version is not None:
            return version.ref
        await self._scheduler.hold(WEIGHTS, model.number, model.steps, 1)
        ref = await self._models.publish(model.number, store=TRAINER_STORE)
        try:
            await self._sampler.load(ref)
        except RpcError as error:
            if error.code != ErrorCode.BUSY:
                raise
        return ref

    async def release_version(self, ref: WeightsRef) -> None:
        """Forget published weights."""
        await self._sampler.unload(ref)
        await self._scheduler.release(WEIGHTS, ref.lineage, ref.step, 1, fence=ref.fence)

    def _parked(self, model: Model) -> Path:
        return self._run / model_folder(model) / PARKED


def _is_taken_over(error: RpcError) -> bool:
    return error.code == ErrorCode.CONFLICT and "taken over" in str(error)


def model_folder(model: Model) -> str:
    """Return the folder of a model, relative to the run directory."""
    return f"models/{model.number}"


def weights_folder(model: Model, name: str, *, sampler: bool) -> str:
    """Return the folder of a checkpoint of a model, relative to the run directory."""
    return f"{model_folder(model)}/{weights_kind(sampler=sampler)}/{name}"


def adapter_spec(adapter: Adapter) -> AdapterSpec:
    return AdapterSpec(rank=adapter.rank, alpha=ALPHA, seed=adapter.seed, groups=adapter.groups)


def adamw(body: dict[str, Any]) -> AdamW:
    """Return the numbers of an `optim_step`."""
    return AdamW(
        lr=body["learning_rate"],
        beta1=body["beta1"],
        beta2=body["beta2"],
        eps=body["eps"],
        weight_decay=body["weight_decay"],
        clip_norm=max(body["grad_clip_norm"], 0.0),
    )


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
