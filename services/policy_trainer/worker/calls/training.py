"""Executes the calls of a training step: forward passes, gradients and updates."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from msgspec import structs

from proto.messages import (
    AdamW,
    BatchMeta,
    Credit,
    CreditDone,
    ErrorCode,
    Forward,
    ForwardBackward,
    ForwardBackwardDone,
    ForwardDone,
    OptimStep,
    OptimStepDone,
    SkipUpdate,
    TaskHandle,
    WorkerReady,
    WorkerRequest,
)
from proto.tensors import Array
from services.policy_trainer.advantages import KL_SCALAR
from services.policy_trainer.update import (
    ADVANTAGES,
    CREDIT_SCALE,
    CREDIT_SHIFT,
    LOSS_TOKENS,
    SHAPED,
    TRUNCATED,
    WEIGHTS,
)
from services.policy_trainer.worker import credit as credits
from services.policy_trainer.worker import samples
from services.policy_trainer.worker.backend import Sequences
from services.policy_trainer.worker.calls.results import put_results
from services.policy_trainer.worker.loaded import Loaded
from services.policy_trainer.worker.loss import BatchLoss
from services.policy_trainer.worker.losses.policy import own_policy_loss
from services.policy_trainer.worker.rank import Rank, Runner
from services.policy_trainer.worker.sample_records import SampleRecords
from services.policy_trainer.worker.samples import TOKEN_ADVANTAGES
from shared.credit import KL_ESTIMATORS
from shared.model.adapter import adapters_off
from shared.model.logprobs import Routing
from shared.model.routing import Routers, routers_of
from shared.ranks.group import GroupEnded
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.samples.text import Choice
from shared.stages import (
    CREDIT,
    LINEAR_LOSS,
    PROX_ROUTES,
    PROXIMAL,
    REFERENCE,
    REFERENCE_SCORE,
    SCORE,
    TRAIN_ADVANTAGES,
    VALUE_AFTER,
    VALUE_LOSS,
    VALUES,
    Stage,
)
from shared.topology.models import Head

PUT_S = 120.0
_REF_KEY = REFERENCE.makes[0]
SUMS: Mapping[str, str] = MappingProxyType({_REF_KEY: REFERENCE_SCORE})
"""The scalars with the sums of results, by the key of the results. Those of the other keys are `score`."""
STAGES: Mapping[Head, tuple[Stage, ...]] = {"language": (PROXIMAL, REFERENCE), "value": (VALUES,)}
"""The stages whose shards a forward pass makes, by the head of the model. Only a model with an adapter makes those of
the reference."""


class TrainingCalls:
    """Changes the gradients and the weights of one rank."""

    def __init__(self, rank: Rank, loaded: Loaded, choice: Choice | None) -> None:
        """`choice` selects the tasks whose samples are recorded."""
        self._rank, self._loaded, self._backend = rank, loaded, loaded.backend
        self._adapted = rank.model.lora is not None
        self._stages = [stage for stage in STAGES[rank.model.head] if self._adapted or stage is not REFERENCE]
        self._own_loss = own_policy_loss(rank.model.loss)
        self._own_credit = credits.own_credit(rank.model.advantage)
        self._records = SampleRecords(choice, rank.data, rank.own_store)
        rank.resources.push_async_callback(self._records.close)

    @property
    def runners(self) -> dict[type[WorkerRequest], Runner]:
        return {
            Forward: self._forward,
            Credit: self._credit,
            ForwardBackward: self._forward_backward,
            OptimStep: self._optim_step,
            SkipUpdate: self._skip_update,
        }

    async def _forward(self, request: Forward, _: Call) -> ForwardDone:
        began, rank = time.perf_counter(), self._rank

        async def read() -> samples.BatchTokens:
            self._check(request)
            return await rank.reader.tokens(request)

        tokens = await rank.ready(request, read())
        flat, added = samples.with_ends(tokens) if request.ends else (tokens.flat, None)
        sequences = _sequences(flat)

        def work() -> dict[str, Array]:
            given = flat[request.routes] if request.routes else None
            return self._passes(request, sequences, given)

        outputs = await rank.together("Forward", work)
        counts, scalars = [task.samples for task in request.batch.tasks], dict[str, Array]()
        if added is not None:
            for key, values in outputs.items():
                scalars[VALUE_AFTER] = samples.of_samples(tokens, counts, values[added])
                outputs[key] = values[~added]
        if request.kl_estimator:
            scalars[KL_SCALAR] = samples.sample_kls(tokens, counts, outputs[_REF_KEY], request.kl_estimator)
        if request.sums:
            scalars |= {SUMS.get(key, SCORE): samples.sample_totals(tokens, counts, outputs[key]) for key in outputs}
            meta = BatchMeta(tasks=_bare(request.batch.tasks) if rank.place.leads else [], stores=[""])
            return ForwardDone(meta=_with_scalars(meta, scalars), seconds=time.perf_counter() - began)
        ends = tokens.tokens_of_task.cumsum()
        pieces = [
            {key: values[end - size : end] for key, values in outputs.items()}
            for end, size in zip(ends, tokens.tokens_of_task, strict=True)
        ]
        stage = next(stage for stage in self._stages if request.keys[0] in stage.makes)
        meta = await put_results(rank, request, stage.name, request.keys, pieces)
        return ForwardDone(meta=_with_scalars(meta, scalars), seconds=time.perf_counter() - began)

    def _check(self, request: Forward) -> None:
        """Raise RpcError(bad_request) if the model cannot compute what is asked for."""
        name, made = self._rank.model.name, [key for stage in self._stages for key in stage.makes]
        wanted = ", ".join(request.keys) or "nothing"
        if not request.keys or len(set(request.keys) & set(made)) < len(request.keys):
            text = f"forward for {wanted}: only {', '.join(made)} can be computed"
            if _REF_KEY in request.keys and not self._adapted:
                text += f", because {name} has no adapter (policy.lora) that could be off"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if request.ends and VALUES not in self._stages:
            raise RpcError(ErrorCode.BAD_REQUEST, f"forward of {name} with ends: only a critic has them")
        if request.sums and (request.ends or request.kl_estimator):
            raise RpcError(ErrorCode.BAD_REQUEST, f"forward for {wanted} with sums: it has neither ends nor a KL")
        if request.kl_estimator and _REF_KEY not in request.keys:
            text = f"forward for {wanted} with kl_estimator {request.kl_estimator}: it needs {_REF_KEY}"
            raise RpcError(ErrorCode.BAD_REQUEST, text)
        if request.routes or PROX_ROUTES in request.keys:
            self._routers()
        if request.kl_estimator not in ("", *KL_ESTIMATORS):
            text = f"forward with kl_estimator {request.kl_estimator}: use {', '.join(KL_ESTIMATORS)}"
            raise RpcError(ErrorCode.BAD_REQUEST, text)

    def _passes(self, request: Forward, sequences: Sequences, given: Array | None) -> dict[str, Array]:
        """Return what the model computes for each key, [T] or [T, W]. Every rank must call this."""
        made: dict[str, Array] = {}
        if keys := [key for key in request.keys if key != _REF_KEY]:
            record = None
            if PROX_ROUTES in keys:
                record = np.zeros((len(sequences.token_ids), self._routers().width), np.uint8)
            routing = None if record is None and given is None else Routing(given, record)
            outputs = self._backend.forward(replace(sequences, routing=routing), request.temperature)
            made = {key: record if record is not None and key == PROX_ROUTES else outputs for key in keys}
        if _REF_KEY in request.keys:
            with adapters_off(self._backend.called):
                made[_REF_KEY] = self._backend.forward(sequences, request.temperature)
        return made

    def _routers(self) -> Routers:
        """Return the routers of the model. Raises RpcError(bad_request) if none can be watched."""
        routers = routers_of(cast(Any, self._backend.called).model)
        if routers is None:
            text = f"{self._rank.model.name} has no routers that can be watched: set algorithm.router_replay to none"
            raise RpcError(ErrorCode.BAD_REQUEST, f"{text}, and algorithm.load_balance.coef to 0")
        return routers

    async def _credit(self, request: Credit, _: Call) -> CreditDone:
        """Compute the advantages of the tokens. No rank meets another one to do so."""
        began, rank = time.perf_counter(), self._rank

        spec = request.credit
        keys = CREDIT.makes if spec.values else (TOKEN_ADVANTAGES,)

        async def assigned() -> tuple[list[dict[str, Array]], dict[str, Array]]:
            batch = request.batch
            credit = credits.check(spec, self._own_credit)
            names = (SHAPED, LOSS_TOKENS, TRUNCATED, *([VALUE_AFTER] if spec.bootstrap else ()))
            scalars = {name: _scalar(batch, name) for name in names}
            tokens = await rank.reader.tokens(request)
            if not rank.place.leads:
                return [], {}
            return await asyncio.to_thread(
                lambda: credits.assign(credits.tasks_of(batch.tasks, tokens, scalars, spec), credit, spec)
            )

        pieces, statistics = await rank.ready(request, assigned())
        meta = await put_results(rank, request, CREDIT.name, keys, pieces)
        return CreditDone(meta=meta, statistics=statistics, seconds=time.perf_counter() - began)

    async def _forward_backward(self, request: ForwardBackward, _: Call) -> ForwardBackwardDone:
        began, rank = time.perf_counter(), self._rank
        recorded = self._records.wanted(request.batch, rank.standing.step) if rank.place.leads else []
        # With cp, this rank computes only its part of each sequence. Values are no log-probs.
        keeps = bool(recorded) and request.loss.anchor != "proximal" and rank.place.layout.cp == 1
        keeps = keeps and VALUES not in self._stages

        async def bind() -> tuple[samples.BatchTokens, BatchLoss]:
            if request.loss.name != LINEAR_LOSS and (request.loss.name == VALUE_LOSS) != (VALUES in self._stages):
                text = f"loss {request.loss.name}: {rank.model.name} computes {self._stages[0].makes[0]}"
                raise RpcError(ErrorCode.BAD_REQUEST, f"{text}; send it to the model that has this loss")
            if request.loss.routes or request.loss.balance_coef:
                self._routers()
            tokens = await rank.reader.tokens(request)
            counts = [task.samples for task in request.batch.tasks]

            def spread() -> BatchLoss:
                advantages = np.zeros(len(tokens.flat["token_ids"]), np.float32)
                if request.loss.name != VALUE_LOSS:  # a critic learns the returns
                    advantages = samples.spread(tokens, counts, _scalar(request.batch, ADVANTAGES))
                if CREDIT_SCALE in request.batch.scalars:
                    scale, shift = (
                        samples.spread(tokens, counts, _scalar(request.batch, name))
                        for name in (CREDIT_SCALE, CREDIT_SHIFT)
                    )
                    # In this order the rounding error stays small where the shift is much larger than the deviation.
                    advantages = advantages + (tokens.flat[TOKEN_ADVANTAGES] - shift) * scale
                weights = samples.spread(tokens, counts, _scalar(request.batch, WEIGHTS))
                # Tokens of weight 0 belong to masked-out samples and do not need to be scored.
                samples.leave_out(tokens, weights == 0)
                if CREDIT_SCALE in request.batch.scalars:
                    tokens.flat[TRAIN_ADVANTAGES] = np.where(tokens.flat["loss_mask"] != 0, advantages, 0.0)
                device = rank.model.settings.device
                # With anchor rollout the trainer's log-probs are current; after an update they belong to no version.
                version = -1 if rank.standing.dirty and request.loss.anchor == "rollout" else rank.standing.step
                return BatchLoss(
                    request.loss, tokens.flat, advantages, weights, device, self._own_loss, version, keeps=keeps
                )

            return tokens, await rank.on_compute_thread(spread)

        tokens, loss = await rank.ready(request, bind())
        spec, temperature = request.loss, request.loss.temperature
        routing = Routing(tokens.flat[spec.routes] if spec.routes else None)
        sequences = replace(_sequences(tokens.flat), routing=routing, balance=spec.balance_coef)

        def work() -> dict[str, float]:
            return self._backend.forward_backward(
                sequences, temperature, loss, entropy=loss.entropy, others=loss.others
            )

        sums = await rank.together("ForwardBackward", work)
        if recorded:
            self._records.put(request.batch, recorded, tokens, loss)
        rank.standing.accumulated += [task.task_id for task in request.batch.tasks]
        return ForwardBackwardDone(sums=sums, seconds=time.perf_counter() - began)

    async def _optim_step(self, request: OptimStep, _: Call) -> OptimStepDone:
        rank = self._rank

        async def may_change() -> None:
            await rank.require_next(request.step, "take an optimizer step for")
            check_optimizer(request.optimizer)
            await rank.weights_settled()

        await rank.ready(request, may_change())
        began = time.perf_counter()
        was_dirty, rank.standing.dirty = rank.standing.dirty, True
        try:
            grad_norm = await rank.together("OptimStep", lambda: self._update(request))
        except GroupEnded:
            raise
        except RpcError as error:
            rank.standing.dirty = was_dirty  # the step was refused before anything changed
            tasks, rank.standing.accumulated = rank.standing.accumulated, []
            some = ", ".join(tasks[:8]) + (f" and {len(tasks) - 8} more" if len(tasks) > 8 else "")
            raise RpcError(error.code, f"{error}; its tasks: {some}", names=tasks) from None
        rank.standing.pristine, rank.standing.dirty = False, not request.last
        seconds = time.perf_counter() - began
        snapshot_s = await self._updated(request)
        return OptimStepDone(grad_norm=grad_norm, lr=request.optimizer.lr, seconds=seconds, snapshot_s=snapshot_s)

    async def _updated(self, request: OptimStep | SkipUpdate) -> float:
        """Record that an update is done or skipped, and end the step after its last one. Return the processor time of
        the snapshot."""
        rank = self._rank
        rank.standing.accumulated = []
        if not request.last:
            return 0.0
        rank.standing.step = request.step
        rank.reader.end_step()
        if request.snapshot_lineage < 0:
            return 0.0
        keep, state = rank.standing.snapshots.keep, partial(self._loaded.state, request.step)
        return await rank.on_compute_thread(partial(keep, request.snapshot_lineage, request.step, state))

    def _update(self, request: OptimStep) -> float:
        grad_norm = self._backend.step(request.step, request.optimizer)
        if request.last and not self._rank.standings.resident:  # earlier versions are those of the trained model
            self._loaded.record(request.step)
        return grad_norm

    async def _skip_update(self, request: SkipUpdate, _: Call) -> WorkerReady:
        rank = self._rank

        await rank.ready(request, rank.require_next(request.step, "skip the update of"))

        def work() -> None:
            self._backend.drop_gradients()
            if request.last:
                self._loaded.record(request.step)

        await rank.together("SkipUpdate", work)
        if request.last:
            rank.standing.dirty = False
        await self._updated(request)
        return WorkerReady(step=rank.standing.step, parameters=self._backend.parameters)


def check_optimizer(optimizer: AdamW) -> None:
    """Raise RpcError(bad_request) if a number of the update is negative or not finite, or a beta is not below 1."""
    for name, value in structs.asdict(optimizer).items():
        limit = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < limit:  # a NaN is refused, too
            upper = " and below 1" if limit == 1 else " and finite"
            raise RpcError(ErrorCode.BAD_REQUEST, f"OptimStep.optimizer.{name} is {value}: it must be 0 or more{upper}")


def _bare(tasks: Sequence[TaskHandle]) -> list[TaskHandle]:
    """Return handles of tasks that have got no shards."""
    return [TaskHandle(task.task_id, task.fence, task.samples, task.tokens) for task in tasks]


def _with_scalars(meta: BatchMeta, scalars: dict[str, Array]) -> BatchMeta:
    """Return the results of a call with their scalars, or as they are if another rank has the same results."""
    return structs.replace(meta, scalars=scalars) if meta.tasks else meta


def _sequences(flat: Mapping[str, Array]) -> Sequences:
    return Sequences(flat["token_ids"], flat["lengths"], flat["loss_mask"])


def _scalar(batch: BatchMeta, name: str) -> Array:
    if name not in batch.scalars:
        present = ", ".join(sorted(batch.scalars)) or "none"
        raise RpcError(ErrorCode.BAD_REQUEST, f"the batch has no per-sample {name} (its scalars: {present}); add them")
    return batch.scalars[name]
