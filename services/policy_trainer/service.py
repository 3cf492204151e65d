"""Implements the driver as an actor, which resumes, trains, and resumes again after a worker is lost.

When the whole run is stopped, the driver saves the committed step before it exits. When only the driver is stopped, it
exits at once, because the workers keep their state.
"""

from __future__ import annotations

import asyncio
import time

from proto.messages import ErrorCode, GetSupervisorState, StepBatch, SupervisorState
from services.policy_trainer.advantages import Estimator
from services.policy_trainer.best import BestCheckpoint
from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.dispatch import WorkersLost
from services.policy_trainer.driver import Driver
from services.policy_trainer.metrics import staleness_counts
from services.policy_trainer.publisher import Publisher
from services.policy_trainer.resume import committed_rates, resume
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.trained_models import TrainedModels, dispatches
from services.policy_trainer.update import optimizer_numbers
from shared import topology as topologies
from shared.actor.service import Service
from shared.rpc.errors import BadInput, RpcError
from shared.rundir import RunDir
from shared.topology import Topology, stop_limit_s

MAX_RECOVERIES = 5
"""Maximum number of consecutive worker losses without a committed step in between."""
MAX_DAMAGES = 20
"""Maximum number of recoveries from lost shards without a committed step in between."""
_HOPELESS = (ErrorCode.BAD_DATA, ErrorCode.BAD_REQUEST)
"""Codes of answers that the next driver would get, too, because it repeats the journaled step with the same data."""
SUPERVISOR_S = 2.0
"""Seconds to wait for the supervisor's answer. A killed supervisor does not answer."""


class PolicyTrainerService(Service):
    """The service `python -m services.policy_trainer`. It exits with status 0 when the run is complete."""

    NAME = "policy-trainer"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._stop = asyncio.Event()
        """Set once the run must end after the open step. This cannot be withdrawn."""
        self._ending = False
        self._trains = False
        """Whether the workers may hold a step that must be saved."""
        self._trained = (0.0, "")
        """The time at which the open step's batch arrived, and the traced tasks of that batch."""

    async def start(self) -> None:
        """Import the advantage estimator, so that the service fails at start-up if the estimator cannot be used."""
        Estimator(topologies.load_resolved(self.run.topology).algorithm.advantage)

    def request_stop(self) -> None:
        if self.supervised and self._trains and not self._ending:
            self._ending = True
            self.keep(self._end())
        elif not self._ending:
            super().request_stop()

    async def _end(self) -> None:
        """If the whole run is ending, first save the committed step within the time limit that the launcher also
        uses."""
        if not await self._run_ends():
            super().request_stop()
            return
        limit_s = stop_limit_s(topologies.load_resolved(self.run.topology))
        self.loop.call_later(limit_s, self._give_up, limit_s)
        self._stop.set()

    def _give_up(self, limit_s: float) -> None:
        self.log.warning("stopped before the committed step was saved", limit_s=limit_s)
        super().request_stop()

    async def _run_ends(self) -> bool:
        """Return whether the whole run is ending. Without a supervisor, return False; all services then exit at
        once."""
        supervisor = self.client("supervisor")
        try:
            state = await supervisor.call(GetSupervisorState(), SupervisorState, deadline_s=SUPERVISOR_S)
        except RpcError:
            return False
        return state.phase == "DRAINING"

    async def serve(self) -> None:
        topology = topologies.load_resolved(self.run.topology)
        self.telemetry.traced_share = topology.monitor.traced_share
        scheduler = SchedulerCalls(self.scheduler, self.incarnation, self._show_batch)
        workers = dispatches(topology.trained, self.client, self.incarnation)
        lost_at, losses, damages = -1, 0, 0
        if (await scheduler.run_info()).stopping:
            return  # an earlier life of the driver finished the run
        while True:
            try:
                await self._train(topology, scheduler, workers)
                return
            except RpcError as error:
                self._trains = False
                if error.code in _HOPELESS:
                    raise BadInput(str(error)) from None
                # Shards of a batch are missing (WorkersLost), or a version is missing (reported by `NextBatch`).
                damaged = error.code == ErrorCode.MISSING
                if not damaged and not isinstance(error, WorkersLost):
                    raise
                if self._stop.is_set():
                    self.log.warning("stopped; the committed step is not saved: workers lost", error=str(error))
                    return
                committed = (await scheduler.run_info()).committed_step
                if committed != lost_at:
                    lost_at, losses, damages = committed, 0, 0
                losses, damages = losses + (not damaged), damages + damaged
                if losses > MAX_RECOVERIES or damages > MAX_DAMAGES:
                    raise
                cause = "shards lost" if damaged else "workers lost"
                self.log.warning(f"{cause}, resuming", committed=committed, error=str(error))

    async def _train(self, topology: Topology, scheduler: SchedulerCalls, workers: TrainedModels) -> None:
        folders = [model.checkpoints(self.run.checkpoints) for model in topology.trained]
        keeping = topology.checkpoint
        checkpoints = Checkpoints(folders, keep_last=keeping.keep_last, keep_every=keeping.keep_every)
        policy = topology.policy_model
        resumed = await resume(
            scheduler,
            workers,
            checkpoints.steps(),
            rate_of=lambda step: optimizer_numbers(policy.optimizer, step - policy.frozen_steps).lr,
            whole_rows=topology.run.deterministic,
            scored=not topology.algorithm.loss.from_rows,
        )
        # A checkpoint is begun only once its step is committed, so later steps were rolled back.
        await asyncio.to_thread(checkpoints.discard_after, resumed.committed)
        metric = keeping.keep_best
        best = BestCheckpoint(self.run, topology, scheduler, metric) if metric is not None else None
        publisher = Publisher(
            topology,
            scheduler,
            workers,
            resumed,
            checkpoints,
            on_stop=lambda step: self.ends_after(f"saving step {step}"),
            best=best,
        )
        self._trains = True
        try:
            saved = checkpoints.steps()
            if best is not None:
                for step in saved:
                    best.add(step)
            if saved:
                # The driver before this one may have been killed before it did so. The step that was loaded stays: if
                # a newer checkpoint is damaged, the next driver needs it again.
                keep = [resumed.version, *(best.keep if best is not None else ())]
                await asyncio.to_thread(checkpoints.prune, saved[-1], keep)
            driver = Driver(
                topology,
                scheduler,
                workers,
                publisher,
                resumed,
                self._show,
                self._stop,
                exports={model.name: model.exported(self.run.path) for model in topology.trained},
                rates=await asyncio.to_thread(committed_rates, self.run.metrics, resumed),
            )
            await driver.train()
        finally:
            await publisher.cancel()

    def _show(self, row: dict[str, float]) -> None:
        self.telemetry.span("step", row["time/step"] - row["time/wait_batch"])
        self.telemetry.emit("train", dict(row))
        waited_s, trained_s = row["time/wait_batch"], time.monotonic() - self._trained[0]
        step: dict[str, float | str] = {"step": row["policy/version"]}
        self.telemetry.part("commit", max(0.0, waited_s + trained_s - row["time/step"]), step)
        self.telemetry.part("train", trained_s, {**step, "tasks": self._trained[1]})
        reward = {"reward": row["reward/mean"]} if "reward/mean" in row else {}
        self.telemetry.part("step", waited_s + trained_s, {**step, **reward})

    def _show_batch(self, batch: StepBatch, waited_s: float) -> None:
        self.telemetry.span("batch", waited_s, {"step": float(batch.step)}, of="scheduler/0")
        self._trained = time.monotonic(), self.telemetry.traced(task.task_id for task in batch.batch.tasks)
        counts = {str(age): float(count) for age, count in staleness_counts(batch).items()}
        self.telemetry.emit("staleness", {"step": float(batch.step), **counts})
