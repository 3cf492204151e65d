"""Drives the scheduler's state machine with its own clock, for tests without sockets or files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proto.messages import (
    Canary,
    CommitStep,
    Complete,
    GetRunInfo,
    GetStatus,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    Refusal,
    Register,
    StepBatch,
    TaskResult,
    WeightsRef,
)
from services.scheduler.events import (
    Answer,
    Asked,
    ClearDone,
    Configure,
    Durable,
    Effect,
    Event,
    Fail,
    Persist,
    SendClear,
)
from services.scheduler.plan import Plan
from services.scheduler.state import Scheduler

LEASE_S = 10.0


STORE = "batch-store/0"


CANARY = Canary(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), tolerance=1e-4)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "run": "test",
        "seed": 3,
        "tasks_per_step": 4,
        "group_size": 2,
        "staleness": 1,
        "shuffle": False,
        "deterministic": False,
        "rows": range(100),
        "block_tasks": 2,
    }
    return Plan(**{**values, **changes})


@dataclass
class Bench:
    """A state machine with its own clock. It keeps all effects and the journal."""

    plan: Plan = field(default_factory=plan)
    config: Configure = field(default_factory=lambda: Configure(5, 3, 2, False))
    now: float = 0.0
    journal: list[Durable] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    calls: int = 0
    lineage: int = 0

    def __post_init__(self) -> None:
        self.machine = Scheduler(self.plan, lease_s=LEASE_S, incarnation=99)
        self._keep(self.machine.begin(self.config, self.now))

    def _keep(self, effects: Sequence[Effect]) -> list[Effect]:
        self.journal += [effect.event for effect in effects if isinstance(effect, Persist)]
        self.effects += effects
        return list(effects)

    def event(self, event: Event, *, after_s: float = 0.0) -> list[Effect]:
        self.now += after_s
        return self._keep(self.machine.handle(event, self.now))

    def ask(self, request: Any, *, wait_s: float = 5.0) -> Any:
        """Return the reply, a Fail, or None while the call is deferred."""
        self.calls += 1
        asked = Asked(self.calls, request, self.now + wait_s, (1, self.calls))
        return self.answer(self.event(asked), self.calls)

    @staticmethod
    def answer(effects: Sequence[Effect], ref: int) -> Any:
        for effect in effects:
            if isinstance(effect, Answer) and effect.ref == ref:
                return effect.body
            if isinstance(effect, Fail) and effect.ref == ref:
                return effect
        return None

    def start(self, **register: Any) -> Bench:
        self.register("batch-store", 0, 1, limit_bytes=register.get("limit_bytes", 1 << 30))
        self.ask(GetRunInfo(driver=1))
        self.publish(0)
        return self

    def register(
        self, service: str, instance: int, incarnation: int, limit_bytes: int = 0, host_id: str = "", data_id: str = ""
    ) -> Any:
        return self.ask(
            Register(
                service=service,
                instance=instance,
                incarnation=incarnation,
                pid=1,
                host="h",
                endpoint="",
                limit_bytes=limit_bytes,
                host_id=host_id,
                data_id=data_id,
            )
        )

    def publish(self, step: int, fence: int = 1) -> Any:
        ref = WeightsRef(
            lineage=self.lineage,
            step=step,
            task_id=f"weights/{self.lineage}/{step}",
            fence=fence,
            store=STORE,
            nbytes=100,
            canary=CANARY,
            drill=CANARY,
            drill_seed=0,
        )
        return self.ask(PublishWeights(driver=1, ref=ref))

    def publish_again(self, step: int) -> Any:
        """Publish a step under the scheduler's newest lineage."""
        self.lineage = self.machine.run.history.lineage
        return self.publish(step)

    def lease(self, stage: str = "rollout", most: int = 4, instance: int = 0, life: int = 7) -> Any:
        return self.ask(LeaseRequest(stage=stage, service=stage, instance=instance, incarnation=life, max_tasks=most))

    def granted(self, stage: str = "rollout", most: int = 4, instance: int = 0, life: int = 7) -> LeaseGrant:
        grant = self.lease(stage, most, instance, life)
        assert isinstance(grant, LeaseGrant), grant
        return grant

    def complete(
        self,
        grant: LeaseGrant,
        *,
        outcome: int = Outcome.DONE,
        content: int = 5,
        reward: float | Sequence[float] = 1.0,
        samples: int = 2,
        failed: int = 0,
        life: int = 7,
        tasks: int | None = None,
        final: bool = True,
        store: str = STORE,
    ) -> list[Refusal]:
        rollout = grant.stage == "rollout"
        results = [
            TaskResult(
                task.task_id,
                task.fence,
                outcome,
                store,
                content,
                samples if rollout else 0,
                20,
                50,
                samples_failed=failed,
            )
            for task in grant.batch.tasks[:tasks]
        ]
        total = samples * len(results) if outcome == Outcome.DONE else 0
        rewards = np.full(total, 1, np.float32) * np.float32(reward)
        scalars = {"reward": rewards, "length": np.arange(total, dtype=np.int32)}
        if grant.weights is not None:
            versions = np.full(total, grant.weights.step, np.int32)
            scalars |= {"version_min": versions, "version_max": versions}
        reply = self.ask(
            Complete(
                lease_id=grant.lease_id,
                stage=grant.stage,
                incarnation=life,
                results=results,
                scalars=scalars if rollout else {},
                final=final,
            )
        )
        return list(reply.refused)

    def step(self, step: int, store: str = STORE) -> StepBatch:
        """Roll out the tasks of a step into `store`, batch and commit the step, and publish its version."""
        batch = self.ask(NextBatch(driver=1, step=step))
        ref = self.calls
        while batch is None:
            grant = self.granted()
            self.complete(grant, store=store)
            batch = self.answer(self.effects, ref)
        assert isinstance(batch, StepBatch), batch
        self.ask(CommitStep(driver=1, step=step, metrics={"loss/policy": 1.0}))
        self.publish(step)
        return batch

    def counts(self) -> dict[str, int]:
        return dict(self.ask(GetStatus()).tasks)

    def acknowledge(self) -> set[tuple[str, int]]:
        """Have the store acknowledge every clear that was sent to it, and return the cleared tasks."""
        done: set[tuple[str, int]] = set()
        seen = 0
        while seen < len(self.effects):
            effect = self.effects[seen]
            seen += 1
            if isinstance(effect, SendClear) and effect.tracked:
                self.effects.remove(effect)
                seen -= 1
                done |= {(task.task_id, task.fence) for task in effect.tasks}
                self.event(ClearDone(effect.store, len(effect.tasks)))
        return done


def ids(grant: LeaseGrant) -> list[str]:
    return [task.task_id for task in grant.batch.tasks]
