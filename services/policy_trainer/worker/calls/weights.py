"""Executes the calls that give the weights to others: publishing a version, and exporting the model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog
import torch
from torch import Tensor

from proto.messages import Canary, ErrorCode, Publish, Published, Saved, SaveModel, WorkerRequest
from services.policy_trainer.worker.backend import Backend
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.weights.publish import (
    NUMBER,
    Canaries,
    Staging,
    number_ref,
    put_and_digested,
    put_weights,
    weights_ref,
)
from shared import model_folder
from shared.dataplane.client import Receipt
from shared.model.adapter import adapters_merged
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred
from shared.weights.drill import canary_error
from shared.weights.weight_set import WeightSet


class WeightsCalls:
    """Reads the weights of one rank. Every rank takes part in gathering them; one of them publishes them."""

    def __init__(self, rank: Rank, loaded: Loaded) -> None:
        self._rank, self._loaded, self._staging = rank, loaded, Staging()
        self._log = structlog.get_logger("worker")

    @property
    def runners(self) -> dict[type[WorkerRequest], Runner]:
        return {Publish: self._publish, SaveModel: self._save_model}

    async def _publish(self, request: Publish, call: Call) -> Published | Deferred:
        """Gather the weights and run the canary in call order. Send the bytes while the canary and the next gradient
        are computed."""
        rank, loaded, canaries = self._rank, self._loaded, self._loaded.canaries
        if canaries is None and rank.model.publishes is not None:
            return await self._publish_number(request)
        if canaries is None:
            raise RpcError(ErrorCode.BAD_REQUEST, f"publish {rank.model.name}: no engine samples with this model")
        is_earlier = request.step < rank.standing.step and rank.model.deterministic and not rank.standing.dirty
        version = loaded.earlier.get(request.step) if is_earlier else None

        async def may_publish() -> None:
            if not is_earlier:
                await rank.require_step(request.step, "publish")
            elif rank.publishes and version is None:
                text = f"version {request.step} is not kept; the worker is at step {rank.standing.step}"
                raise RpcError(ErrorCode.CONFLICT, text)
            await rank.weights_settled()

        await rank.ready(request, may_publish())
        began = time.perf_counter()
        weights: dict[str, Tensor] = {}
        if version is not None:
            weights = version.weights
        elif not is_earlier:
            weights = await rank.together("Publish", loaded.backend.published)
        if not rank.publishes:
            if not is_earlier:
                await rank.together("Publish", canaries.current)
            return Published(seconds=time.perf_counter() - began)
        put = asyncio.ensure_future(put_weights(rank.data, weights, request, self._staging))
        record = asyncio.ensure_future(asyncio.to_thread(canaries.weight_set, weights))
        try:
            canary = version.canary if version else await rank.together("Publish", canaries.current)
        except BaseException:
            await asyncio.wait([put, record])
            raise
        rank.begin_publication(self._answer(request, call, weights, put, record, canaries, canary, began))
        return DEFERRED

    async def _publish_number(self, request: Publish) -> Published:
        """Publish a version with which no engine samples: a number, without weights and canaries."""
        rank, began = self._rank, time.perf_counter()

        async def may_publish() -> None:
            if request.step > rank.standing.step:
                await rank.require_step(request.step, "publish")

        await rank.ready(request, may_publish())
        if not rank.publishes:
            return Published(seconds=time.perf_counter() - began)
        step = {NUMBER: torch.tensor([request.step])}
        receipt = await put_weights(rank.data, step, request, self._staging)
        return Published(ref=number_ref(receipt, request), seconds=time.perf_counter() - began)

    async def _answer(
        self,
        request: Publish,
        call: Call,
        weights: dict[str, Tensor],
        put: asyncio.Future[Receipt],
        record: asyncio.Future[WeightSet],
        canaries: Canaries,
        canary: Canary,
        began: float,
    ) -> None:
        """Answer `call` once the weights are in the store."""
        try:
            receipt, weight_set = await put_and_digested(put, record)
            ref = weights_ref(receipt, canaries, canary, weight_set, request)
        except Exception as error:
            # The weights have not changed, so later calls may proceed.
            self._rank.refuse(request, call, error)
        else:
            if self._rank.sender is not None:
                self._rank.sender.published(ref, weights)
            call.reply(Published(ref=ref, seconds=time.perf_counter() - began))

    async def _save_model(self, request: SaveModel, _: Call) -> Saved:
        began, rank = time.perf_counter(), self._rank
        await rank.ready(request, asyncio.sleep(0))
        target, lora, canaries = Path(request.path), rank.model.lora, self._loaded.canaries
        await rank.together("SaveModel", lambda: export(self._loaded.backend, rank.model.folder, target))
        if lora is not None and lora.export_merged and canaries is not None:
            error = await rank.together("SaveModel", lambda: merging_error(self._loaded.backend, canaries))
            if rank.place.rank == 0:
                self._log.info("adapter merged", path=request.path, logprob_error=error)
        return Saved(path=request.path, seconds=time.perf_counter() - began)


def export(backend: Backend, policy_dir: Path, target: Path) -> None:
    """Write the model, the configuration and the tokenizer files of `policy_dir` and move them to `target`, replacing
    any earlier export.

    Every rank must call this; rank 0 writes. Raises OSError (no space, no permission).
    """
    leads = backend.place.rank == 0
    backend.export(model_folder.begin(target) if leads else target)
    if leads:
        model_folder.finish(policy_dir, target)


def merging_error(backend: Backend, canaries: Canaries) -> float:
    """Return the largest difference that merging the adapter makes to a log-prob of the canary, because the weights'
    data type rounds what is added to them. Every rank must call this; rank 0's result is used."""
    canary = canaries.current()
    with adapters_merged(backend.called):
        merged = canaries.current()
    return canary_error(canary.logprobs, merged.logprobs, 1.0)
