"""The promises of docs/architecture.md, checked after every event of a world."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from proto.messages import LeaseGrant, PutTask, StepBatch
from services.batch_store.room import Tier
from services.batch_store.server import StoreService
from services.scheduler.events import Answer, Effect, Persist, Rewound, Tick
from services.scheduler.server import SchedulerService
from services.scheduler.state import Scheduler
from shared.rpc.errors import RpcError
from shared.rundir import checkpoint_steps
from tests.sim.model import NAME, task_of

if TYPE_CHECKING:
    from tests.sim.clock import Node
    from tests.sim.scenario import Key
    from tests.sim.world import World


class Checks:
    """What an observer of a run knows, across the lives of its processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler: SchedulerService | None = None
        self._store: StoreService | None = None
        self.batches: dict[int, tuple[str, ...]] = {}
        """The tasks of each step as a driver was told."""
        self._leases: dict[int, tuple[tuple[str, int], ...]] = {}
        """The tasks and fences of each lease that was granted."""
        self._fences: dict[tuple[int, str, int], int] = {}
        """Stage, task and fence -> lease."""
        self._cleared: dict[str, int] = {}
        """Task -> highest fence whose clear the store has acknowledged."""
        self.chain = 0

    # ---- lives

    def watch(self, key: Key, node: Node) -> None:
        """Observe a process that has just started."""
        service = node.service
        if isinstance(service, SchedulerService):
            self._scheduler = service
            node.on_kill.append(lambda: _close_scheduler(service))
        elif isinstance(service, StoreService):
            self._store = service
            node.on_kill.append(lambda: _close_store(service))
            self._watch_store(service)

    def died(self, key: Key, node: Node) -> None:
        """Forget a process that is dead."""
        if node.service is self._scheduler:
            self._scheduler = None
        elif node.service is self._store:
            self._store = None

    # ---- the scheduler

    def handled(self, machine: Scheduler, event: Any, effects: list[Effect]) -> None:
        """Check what the scheduler decided."""
        for effect in effects:
            if isinstance(effect, Answer):
                self._answered(effect.body)
            elif isinstance(effect, Rewound):
                self.batches = {step: ids for step, ids in self.batches.items() if step <= effect.step}
        if isinstance(event, Tick) and not any(isinstance(effect, Persist) for effect in effects):
            return
        try:
            machine.run.validate()
        except AssertionError as error:
            self._world.check(False, f"the scheduler's state: {error}")
        self.shards_are_readable()

    def _answered(self, body: object) -> None:
        check = self._world.check
        if isinstance(body, StepBatch):
            ids = tuple(task.task_id for task in body.batch.tasks)
            known = self.batches.setdefault(body.step, ids)
            check(known == ids, f"promise 2: step {body.step} had {', '.join(known)} and now has {', '.join(ids)}")
            for step, others in self.batches.items():
                both = set(others) & set(ids) if step != body.step else set()
                check(not both, f"promise 2: {', '.join(sorted(both))} is in step {step} and in step {body.step}")
        elif isinstance(body, LeaseGrant):
            held = tuple((task.task_id, task.fence) for task in body.batch.tasks)
            known_lease = self._leases.setdefault(body.lease_id, held)
            check(known_lease == held, f"lease {body.lease_id} was of {known_lease} and is now of {held}")
            for task_id, fence in held:
                first = self._fences.setdefault((0 if body.stage == "rollout" else 1, task_id, fence), body.lease_id)
                check(
                    first == body.lease_id or body.stage != "rollout",
                    f"fence {fence} of {task_id} was given to lease {first} and to lease {body.lease_id}",
                )

    # ---- the store

    def _watch_store(self, service: StoreService) -> None:
        index = service.index
        clear = index.clear

        def cleared(tasks: Any) -> Any:
            tasks = list(tasks)
            self._nothing_leased(tasks)
            return clear(tasks)

        index.clear = cleared  # type: ignore[method-assign]

    def _nothing_leased(self, tasks: list[PutTask]) -> None:
        if self._scheduler is None or not hasattr(self._scheduler, "_state"):
            return
        for lease in self._scheduler._state.run.leases:
            for task in lease.tasks.values():
                for each in tasks:
                    self._world.check(
                        each.task_id != task.task_id or each.fence < task.fence,
                        f"promise 3: {each.task_id} is collected under fence {each.fence}, and lease {lease.lease_id} "
                        f"holds fence {task.fence}",
                    )

    def acknowledged(self, tasks: list[PutTask]) -> None:
        """Note that the store has acknowledged a clear."""
        for task in tasks:
            self._cleared[task.task_id] = max(self._cleared.get(task.task_id, 0), task.fence)
        self.store_is_sound()

    def store_is_sound(self) -> None:
        """Check promise 4, and that what was collected stays away."""
        store = self._store
        if store is None:
            return
        room = store.index.room
        for tier in Tier:
            self._world.check(
                room.used[tier] <= room.limits[tier],
                f"promise 4: {room.used[tier]} of {room.limits[tier]} bytes are used",
            )
        if not store._scanned.done():
            return
        page, _ = store.index.inventory(0)
        for each in page:
            self._world.check(
                self._cleared.get(each.task_id, -1) < each.fence,
                f"promise 3: {each.task_id} can be read under fence {each.fence} after its collection",
            )

    def shards_are_readable(self) -> None:
        """Check promise 1: what the scheduler has accepted and not ordered to be collected is in the store."""
        if self._store is None or self._scheduler is None or not self._store._scanned.done():
            return
        for task in self._scheduler._state.run.tasks:
            if task.made and not task.clears:
                try:
                    self._store.index.locate([PutTask(task.task_id, task.fence)])
                except RpcError as error:
                    self._world.check(False, f"promise 1: {task.task_id}, {task.state}: {error}")

    # ---- the end

    def at_end(self) -> None:
        """Check what a finished run has left behind."""
        world = self._world
        run, steps = world.run_dir, world.scenario.size.steps
        chain, _, applied = (run.export / NAME).read_text().partition(" ")
        self.chain = int(chain)
        with closing(sqlite3.connect(run.journal)) as journal:
            rows = journal.execute("SELECT step, task_ids FROM steps WHERE state = 'TRAINED' ORDER BY step").fetchall()
        world.check([step for step, _ in rows] == list(range(1, steps + 1)), f"the journal has steps {rows}")
        batches = [sorted(json.loads(ids)) for _, ids in rows]
        trained = [task_of(int(number)) for number in applied.split(",") if number]
        at = 0
        for step, ids in enumerate(batches, 1):
            mine = sorted(trained[at : at + len(ids)])
            world.check(mine == ids, f"promise 2: step {step} was to train {ids} and trained {mine}")
            at += len(ids)
        world.check(at == len(trained), f"promise 2: also trained: {trained[at:]}")
        lines = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
        world.check(lines == list(range(1, steps + 1)), f"metrics.jsonl has the rows of steps {lines}")
        world.check(steps in checkpoint_steps(run.checkpoints), "the last step has no checkpoint")


def _close_scheduler(service: SchedulerService) -> None:
    if hasattr(service, "_journal"):
        service._journal.close()
    if hasattr(service, "_metrics"):
        _quietly(service._metrics.close)


def _close_store(service: StoreService) -> None:
    if service._files is not None:
        _quietly(service._files.close)


def _quietly(close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # closed before, by the process itself
        close()
