"""The algorithm: how a policy is trained, step by step. Knows no rank, device or micro-batch and holds no token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from proto.messages import BatchMeta, ErrorCode, LossSpec, StepBatch
from proto.tensors import Array
from services.policy_trainer import advantages, batches, token_weights
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.metrics import StepMetrics
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import Standing
from services.policy_trainer.scheduler_calls import SchedulerCalls
from shared.batch import Batch
from shared.rpc.errors import RpcError
from shared.stages import PROXIMAL
from shared.topology.schema import Topology

PROX_KEY = PROXIMAL.makes[0]


class Driver:
    """Trains from `standing` to the topology's last step; a new one is made when the workers had to be reloaded."""

    def __init__(
        self,
        topology: Topology,
        scheduler: SchedulerCalls,
        workers: WorkerDispatch,
        publisher: Publisher,
        standing: Standing,
        on_row: Callable[[dict[str, float]], None],
    ) -> None:
        """`on_row` gets every committed step's metrics (telemetry)."""
        self.topology = topology
        self.scheduler = scheduler
        self.workers = workers
        self.publisher = publisher
        self.standing = standing
        self.on_row = on_row

    async def train(self) -> None:
        """Every step up to the last, weights published and checkpoints saved. Raises RpcError."""
        version, last = self.standing.version, self.topology.run.steps
        if version == self.standing.committed:
            self.publisher.begin(version)
        while version < last:
            began = time.perf_counter()
            metrics = StepMetrics(step=version + 1)
            batch = await self.publisher.watch(self.scheduler.next_batch(metrics.step))
            metrics.wait_batch_s = time.perf_counter() - began
            await self.step(batch, metrics)
            version = metrics.step
            if version > self.standing.committed:
                await self.publisher.collect(metrics)
                row = metrics.row(batch, step_s=time.perf_counter() - began)
                await self.scheduler.commit(version, row)
                self.on_row(row)
            if version >= self.standing.committed:
                self.publisher.begin(version, checkpoint_now=batch.checkpoint_now)
        await self.publisher.finish()

    async def step(self, batch: StepBatch, metrics: StepMetrics) -> None:
        """One training step on the batch of its group samples."""
        algorithm = self.topology.algorithm
        tasks = batch.batch
        check_rewards(batch)
        if algorithm.loss.anchor == "proximal":
            done = await self.workers.forward(tasks, key=PROX_KEY, temperature=self.topology.sampling.temperature)
            tasks = Batch(tasks).union(Batch(done.meta)).meta
            metrics.forward_s += done.seconds
        advantage = advantages.grpo(
            batch.scalars["reward"], batches.group_of_sample(tasks), scale=algorithm.advantage.scale
        )
        mini_batches = batches.split(tasks, algorithm.mini_batch_tasks) * algorithm.num_iterations
        for index, (mini_batch, samples) in enumerate(mini_batches):
            weights = token_weights.sample_weights(
                algorithm.loss.aggregation,
                batch.scalars["loss_tokens"][samples],
                max_new_tokens=self.topology.sampling.max_new_tokens,
            )
            await self.update(mini_batch, advantage[samples], weights, metrics, last=index + 1 == len(mini_batches))

    async def update(
        self, batch: BatchMeta, advantage: Array, weights: Array, metrics: StepMetrics, *, last: bool
    ) -> None:
        """One optimizer step; both calls are on their way at once, the workers keep their order."""
        gradient, update = await asyncio.gather(
            self.workers.forward_backward(batch, self.loss(), advantages=advantage, weights=weights),
            self.workers.optim_step(metrics.step, last=last),
        )
        metrics.add_sums(gradient.sums, gradient.seconds)
        metrics.add_update(update)

    def loss(self) -> LossSpec:
        """The topology's loss as the workers apply it to each token."""
        loss, kl = self.topology.algorithm.loss, self.topology.algorithm.kl
        in_loss = kl is not None and kl.place == "loss" and kl.coef > 0
        return LossSpec(
            name=loss.name,
            clip_low=loss.clip[0],
            clip_high=loss.clip[1],
            anchor=loss.anchor,
            temperature=self.topology.sampling.temperature,
            tis_cap=loss.tis_cap or 0.0,
            kl_estimator=kl.estimator if kl is not None and in_loss else "",
            kl_coef=kl.coef if kl is not None and in_loss else 0.0,
        )


def check_rewards(batch: StepBatch) -> None:
    """Raises RpcError(bad_request) naming the tasks with a reward that is not finite, before anything is computed."""
    wrong = ~np.isfinite(batch.scalars["reward"])
    if wrong.any():
        groups = batches.group_of_sample(batch.batch)
        names = [batch.batch.tasks[index].task_id for index in np.unique(groups[wrong])]
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"step {batch.step} refused, weights untouched: {int(wrong.sum())} rewards are not finite, in tasks "
            f"{', '.join(names[:8])}; make the reward function return a finite number",
            names=names,
        )
