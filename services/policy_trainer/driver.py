"""Runs the training algorithm step by step. The driver does not deal with ranks, devices or micro-batches, and holds no
tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import structlog
from msgspec import structs

from proto.messages import AdamW, ForwardDone
from proto.tensors import Array
from services.policy_trainer.advantages import Estimator, shaped, turn_scale
from services.policy_trainer.bad_data import BadSteps, check_batch, check_finite
from services.policy_trainer.checkpoints import SnapshotPace
from services.policy_trainer.metrics import ModelMetrics, StepMetrics
from services.policy_trainer.preferences import PAIR_SAMPLES, compare
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import ResumePoint
from services.policy_trainer.scheduler_calls import SchedulerCalls, StepTasks
from services.policy_trainer.trained_models import TrainedModels, together
from services.policy_trainer.update import (
    ADVANTAGES,
    CREDIT_SCALE,
    CREDIT_SHIFT,
    LOSS_TOKENS,
    SHAPED,
    TRUNCATED,
    WEIGHTS,
    credit_spec,
    linear_spec,
    loss_spec,
    optimizer_numbers,
    sample_weights,
    trained_tokens,
    value_spec,
    whitenings,
)
from shared.batch import Batch
from shared.rpc.errors import BadInput, RpcError
from shared.stages import PROXIMAL, REFERENCE, REFERENCE_SCORE, SCORE, VALUES, with_keys_of
from shared.topology.models import CRITIC, POLICY, Head, TrainedModel
from shared.topology.schema import Topology

T = TypeVar("T")
READ = (ADVANTAGES, CREDIT_SCALE, CREDIT_SHIFT)
"""Names of the per-sample scalars that `forward_backward` reads, if they exist, besides the weights. A critic reads
none."""
SCORED: Mapping[Head, tuple[str, ...]] = {"language": PROXIMAL.makes[:1], "value": VALUES.makes}
"""The outputs whose sums losses of pairs compare, by the head of the model."""


class Driver:
    """Trains from `resumed` to the topology's last step. Each resume point needs a new driver."""

    def __init__(
        self,
        topology: Topology,
        scheduler: SchedulerCalls,
        workers: TrainedModels,
        publisher: Publisher,
        resumed: ResumePoint,
        on_row: Callable[[dict[str, float]], None],
        stop: asyncio.Event | None = None,
        *,
        exports: Mapping[str, Path],
        rates: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """`on_row` receives the metrics of every committed step (telemetry). `stop` may end the run early. `exports`
        are the folders to which the trained models are written. `rates` are the policy's learning rates of committed
        steps.

        Raises RpcError(bad_request) as `Estimator` does.
        """
        self.topology = topology
        self.models = {model.name: model for model in topology.trained}
        self.losses = {POLICY: linear_spec() if topology.algorithm.loss.compares else loss_spec(topology)}
        if topology.critic is not None:
            self.losses[CRITIC] = value_spec(topology.critic.value_clip)
        self.estimator = Estimator(topology.algorithm.advantage)
        self.scheduler = scheduler
        self.workers = workers
        self.publisher = publisher
        self.resumed = resumed
        self.on_row = on_row
        self.exports = exports
        self.rates = rates
        self.stop = stop or asyncio.Event()
        self.bad_steps = BadSteps(topology.run.on_bad_step)
        self.snapshots = SnapshotPace(topology.checkpoint.memory_every)
        self._log = structlog.get_logger("driver")

    async def train(self) -> None:
        """Run every step up to the last, publishing weights and saving checkpoints. Raises RpcError.

        If the run is stopped, finish the open step and save the last committed step.
        """
        checkpoint_now = await self.replay()
        version = self.resumed.committed
        self.publisher.begin(version, checkpoint_now=checkpoint_now)
        while version < self.topology.run.last_step:
            began = time.perf_counter()
            metrics = StepMetrics(version + 1, scored=not self.topology.algorithm.loss.from_rows)
            batch = await self.publisher.watch(unless(self.stop, self.scheduler.next_batch(metrics.step)))
            if batch is None:
                return await self.publisher.stop(version)
            metrics.wait_batch_s = time.perf_counter() - began
            await self.step(batch, metrics)
            version = metrics.step
            await self.publisher.collect(metrics)
            row = metrics.row(batch.answer, step_s=time.perf_counter() - began)
            await self.scheduler.commit(version, row)
            self.on_row(row)
            self.publisher.begin(version, checkpoint_now=batch.answer.checkpoint_now)
        await unless(self.stop, self.finish(version))
        if self.stop.is_set():
            await self.publisher.stop(version)

    async def replay(self) -> bool:
        """Repeat the committed steps that the workers have lost, without committing or publishing them again.

        Return True if the scheduler wants the committed step to be saved at once.
        """
        checkpoint_now = self.resumed.checkpoint_now
        for step in range(self.resumed.version + 1, self.resumed.committed + 1):
            began = time.perf_counter()
            metrics = StepMetrics(step, scored=not self.topology.algorithm.loss.from_rows)
            batch = await self.scheduler.next_batch(step)
            metrics.wait_batch_s = time.perf_counter() - began
            await self.step(batch, metrics)
            # The row is already written; the log shows whether the replay produced the same numbers.
            self._log.info(
                "replayed", **{"step": step, **metrics.row(batch.answer, step_s=time.perf_counter() - began)}
            )
            checkpoint_now = self.resumed.checkpoint_now or batch.answer.checkpoint_now
        return checkpoint_now

    async def finish(self, version: int) -> None:
        """Wait for the evaluations of the last version, `version`. Then export the trained models and end the run."""
        await self.publisher.watch(self.scheduler.wait_evals(version))
        await self.publisher.settle()
        if version:
            await self.workers.save_hf_models(self.exports)
        await self.scheduler.finish()

    async def step(self, batch: StepTasks, metrics: StepMetrics) -> None:
        """Run one training step on its batch."""
        metrics.models = {name: ModelMetrics() for name in self.models}
        mini_batches: dict[str, list[Batch]] = {}
        skipped = False
        try:
            mini_batches = await self.prepare(batch, metrics)
        except RpcError as error:  # no update is possible in this step
            self.bad_steps.skip(metrics.step, error)
            skipped = True
        keeps = self.snapshots.due(metrics.step, time.monotonic())
        lineage = self.resumed.lineage if keeps else -1
        await together(
            [self.update_all(name, mini_batches.get(name, []), metrics, lineage, bad=skipped) for name in self.models]
        )
        self.bad_steps.ended(metrics.step, metrics.updates)

    async def prepare(self, batch: StepTasks, metrics: StepMetrics) -> dict[str, list[Batch]]:
        """Return the mini-batches of all iterations of each model, with per-sample advantages and loss weights."""
        algorithm = self.topology.algorithm
        check_batch(batch)
        trained = [name for name, model in self.models.items() if metrics.step > model.frozen_steps]
        tasks = await self.forward(batch.tasks, trained, metrics)
        loss_tokens = trained_tokens(algorithm.overlong, tasks.scalars)
        tasks = tasks.with_scalars({**tasks.scalars, LOSS_TOKENS: loss_tokens})
        if algorithm.loss.compares:
            tasks = self.compare(batch, tasks, metrics)
        elif algorithm.advantage.per_token:
            tasks = await self.credit(batch, tasks, metrics)
        else:
            tasks = tasks.with_scalars({ADVANTAGES: self.advantages(batch, tasks), LOSS_TOKENS: loss_tokens})
        return {name: self.mini_batches(self.models[name], tasks) for name in trained}

    async def forward(self, tasks: Batch, trained: Sequence[str], metrics: StepMetrics) -> Batch:
        """Return `tasks` with what the models say about them before their first update. Their passes overlap."""
        passes: dict[str, Awaitable[ForwardDone]] = {}
        topology, given = self.topology, tasks.with_scalars({})
        reward_kl = topology.algorithm.reward_kl
        if CRITIC in self.models:
            ends = topology.algorithm.advantage.truncated == "bootstrap"
            passes[CRITIC] = self.workers[CRITIC].forward(given, VALUES.makes, ends=ends)
        keys = with_keys_of(PROXIMAL, topology).makes if POLICY in trained else ()
        estimator, sums = "", topology.algorithm.loss.compares
        if sums:
            keys = SCORED[self.models[POLICY].head]
        if topology.reference_by_trainer and (POLICY in trained or reward_kl is not None):
            keys += REFERENCE.makes
            estimator = "" if reward_kl is None else reward_kl.estimator
        if keys:
            temperature = self.losses[POLICY].temperature
            routes = topology.algorithm.route_key if topology.algorithm.router_replay == "rollout" else ""
            passes[POLICY] = self.workers[POLICY].forward(
                given, keys, temperature, kl_estimator=estimator, sums=sums, routes=routes
            )
        for name, done in zip(passes, await together(list(passes.values())), strict=True):
            tasks = tasks.union(Batch(done.meta))
            metrics.add_forward(name, done)
        return tasks

    def mini_batches(self, model: TrainedModel, tasks: Batch) -> list[Batch]:
        """Return the mini-batches of all iterations of `model`, with the scalars that its updates read."""
        made: list[Batch] = []
        for part in tasks.split(model.mini_batch_tasks):
            weights = sample_weights(
                "none" if self.topology.algorithm.loss.compares else self.topology.algorithm.loss.aggregation,
                part.scalars[LOSS_TOKENS],
                max_new_tokens=self.topology.sampling.max_new_tokens,
            )
            read = {name: part.scalars[name] for name in READ if name in part.scalars and model.name != CRITIC}
            made.append(part.with_scalars({**read, WEIGHTS: weights}))
        return made * model.num_iterations

    def compare(self, batch: StepTasks, tasks: Batch, metrics: StepMetrics) -> Batch:
        """Return `tasks` with the advantages of a loss that compares the two answers of each row.

        Raises RpcError like `advantages`.
        """
        loss, scalars = self.topology.algorithm.loss, tasks.scalars
        check_finite(batch, "scores", scalars[SCORE])
        try:
            if any(task.samples != PAIR_SAMPLES for task in tasks.tasks):
                raise ValueError("a task has not exactly a chosen and a rejected answer")
            compared = compare(loss, scalars[SCORE], scalars.get(REFERENCE_SCORE), scalars[LOSS_TOKENS])
        except ValueError as error:
            raise BadInput(f"step {batch.answer.step} refused, weights untouched: {error}") from error
        advantages = compared.advantages.astype(np.float32)
        check_finite(batch, "advantages", advantages)
        metrics.add_compared(compared)
        return tasks.with_scalars({ADVANTAGES: advantages, LOSS_TOKENS: scalars[LOSS_TOKENS]})

    async def credit(self, batch: StepTasks, tasks: Batch, metrics: StepMetrics) -> Batch:
        """Return `tasks` with the advantages that workers have computed for every token, and their whitening.

        Raises RpcError like `advantages`.
        """
        given = tasks.scalars
        rewards = shaped(self.topology, given)
        check_finite(batch, "rewards", rewards)
        scalars = {
            SHAPED: rewards.astype(np.float32),
            LOSS_TOKENS: tasks.scalars[LOSS_TOKENS],
            TRUNCATED: given[TRUNCATED],
            **{name: tasks.scalars[name] for name in VALUES.scalars if name in tasks.scalars},
        }
        spec = credit_spec(self.topology, turn_scale(self.topology, given["reward"]))
        done = await self.workers[POLICY].credit(tasks.with_scalars(scalars), spec)
        metrics.add_credit(done)
        counts = [task.samples for task in tasks.tasks]
        advantage, size = self.topology.algorithm.advantage, self.models[POLICY].mini_batch_tasks
        shift, scale = whitenings(advantage.whiten, done.statistics, size)
        return tasks.union(Batch(done.meta)).with_scalars(
            {
                LOSS_TOKENS: tasks.scalars[LOSS_TOKENS],
                ADVANTAGES: np.zeros(len(rewards), np.float32),
                CREDIT_SHIFT: np.repeat(shift, counts).astype(np.float32),
                CREDIT_SCALE: np.repeat(scale, counts).astype(np.float32),
            }
        )

    def advantages(self, batch: StepTasks, tasks: Batch) -> Array:
        """Return the advantages of the whole step, float32 [samples]. `tasks` are its tasks with all their scalars.

        Raises RpcError: bad_data if an advantage or a shaped reward is not finite, bad_request if they cannot be
        computed.
        """
        try:
            rewards = shaped(self.topology, tasks.scalars)
            check_finite(batch, "rewards", rewards)
            advantages = self.estimator(rewards, tasks.groups, batch.tasks.scalars[LOSS_TOKENS])
        except ValueError as error:
            raise BadInput(f"step {batch.answer.step} refused, weights untouched: {error}") from error
        check_finite(batch, "advantages", advantages)
        return advantages

    async def update_all(
        self, name: str, mini_batches: Sequence[Batch], metrics: StepMetrics, lineage: int, *, bad: bool
    ) -> None:
        """Take all optimizer steps of a model. Without `mini_batches`, the model ends the step as it is, because the
        step is `bad` or the model is not trained yet. With a `lineage` of 0 or more, its workers keep a snapshot."""
        dispatch, measured = self.workers[name], metrics.models[name]
        if not mini_batches:
            await self.skip_update(name, metrics, 1, lineage)
            measured.skipped += bad
            return
        left = len(mini_batches)
        dispatch.begin_step(updates=left, snapshot_lineage=lineage)
        for index, mini_batch in enumerate(mini_batches):
            try:
                await self.update(name, mini_batch, metrics)
            except RpcError as error:
                self.bad_steps.skip(metrics.step, error)
                await self.skip_update(name, metrics, left - index, lineage)
                measured.skipped += 1

    async def update(self, name: str, batch: Batch, metrics: StepMetrics) -> None:
        """Take one optimizer step. Both calls are sent at once; the workers run them in order."""
        gradient, update = await asyncio.gather(
            self.workers[name].forward_backward(batch, self.losses[name]),
            self.workers[name].optim_step(self.numbers(name, metrics.step)),
            return_exceptions=True,
        )
        if isinstance(gradient, BaseException):
            raise gradient
        if isinstance(update, BaseException):
            raise update
        metrics.models[name].add_gradient(gradient)
        metrics.models[name].add_update(update)
        self.snapshots.kept(update.snapshot_s)

    def numbers(self, name: str, step: int) -> AdamW:
        """Return the numbers of an update of `step`. A replayed step repeats the policy's learning rate of its
        commit."""
        numbers = optimizer_numbers(self.models[name].optimizer, step - self.models[name].frozen_steps)
        if name == POLICY and step in self.rates:
            return structs.replace(numbers, lr=self.rates[step])
        return numbers

    async def skip_update(self, name: str, metrics: StepMetrics, left: int, lineage: int) -> None:
        """Skip the first of the `left` remaining updates of a model in the step. Its tasks count as consumed."""
        dispatch = self.workers[name]
        await dispatch.go_on(metrics.step - 1)
        dispatch.begin_step(updates=left, snapshot_lineage=lineage)
        await dispatch.skip_update()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if `stop` is set first."""
    if stop.is_set():
        work.close()
        return None
    task, order = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiting in (task, order):
            waiting.cancel()
        await asyncio.gather(task, order, return_exceptions=True)
