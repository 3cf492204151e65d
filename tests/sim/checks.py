"""Checks the promises of docs/architecture.md after every event of a world."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from proto.messages import Complete, CompleteAck, GetRunInfo, LeaseGrant, Outcome, PutTask, StepBatch, TaskState
from services.batch_store.room import Tier
from services.batch_store.server import StoreService
from services.scheduler.events import Answer, Asked, DriverRequest, Effect, Persist, Rewound, SaveStep, SendClear
from services.scheduler.server import SchedulerService
from services.scheduler.state import Scheduler
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rundir import checkpoint_steps
from shared.stages import ROLLOUT
from shared.topology.models import TrainedModel
from tests.sim.invariants import check_invariants
from tests.sim.model import NAME, digest, task_of
from tests.sim.virtual import topology_of

if TYPE_CHECKING:
    from tests.sim.clock import Node
    from tests.sim.scenario import Key
    from tests.sim.world import World


Held = tuple[tuple[str, int], ...]
"""Tasks, each with its id and a fence."""


class Checks:
    """What an observer of a run knows, across the lives of the run's processes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler: SchedulerService | None = None
        self._store: StoreService | None = None
        self.batches: dict[int, Held] = {}
        """Tasks of each step, as reported to a driver."""
        self._trained: set[int] = set()
        self._requests: WeakKeyDictionary[Call, object] = WeakKeyDictionary()
        self._uncommitted: list[Effect] = []
        self._drivers: list[int] = []
        """Incarnations of the drivers that have taken over, in order."""
        self._leases: dict[int, tuple[int, Held]] = {}
        """For each granted lease, the incarnation of its holder, and its tasks with their fences."""
        self._accepted: set[tuple[str, int]] = set()
        """Task ids and fences of the results that lease holders completed."""
        self._asked: dict[tuple[int, int], int] = {}
        """Last lease given to each request, by incarnation and id of the request."""
        self._fences: dict[tuple[str, int], int] = {}
        """Rollout lease of each task and fence."""
        self._newest: dict[str, int] = {}
        """Highest fence given to each task."""
        self._puts: dict[tuple[str, int], str] = {}
        """Last put that the store has acknowledged for each task and fence."""
        self._cleared: dict[str, int] = {}
        """Highest fence of each task whose clear the store has acknowledged, or whose clear was in effect when the
        store died."""
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

    def died(self, key: Key, node: Node) -> None:
        """Forget a process that is dead."""
        if node.service is self._scheduler:
            self._scheduler = None
            self._uncommitted.clear()
        elif node.service is self._store and self._store is not None:
            for task_id, fence in self._store.index.tombstones.items():
                self._collected(task_id, fence)
            self._store = None

    # ---- the scheduler

    def handled(self, machine: Scheduler, event: Any, effects: list[Effect]) -> None:
        """Check the state after an event. Messages to other processes are checked when they are sent."""
        check = self._world.check
        if isinstance(event, Asked):
            self._requests[cast(Call, event.ref)] = event.request
        self._uncommitted += [effect for effect in effects if isinstance(effect, SaveStep | Rewound)]
        for effect in effects:
            if isinstance(effect, Answer) and isinstance(effect.body, CompleteAck):
                self._accept(cast(Complete, self._requests[cast(Call, effect.ref)]), effect.body)
        if not any(isinstance(effect, Persist) for effect in effects):
            return
        size, run = self._world.scenario.size, machine.run
        live = run.ledger.window.live + len(run.history.open_batch)
        most = (size.staleness + 1) * size.tasks
        check(live <= most or size.deterministic, f"{live} tasks are live, but the bound is {most}")
        try:
            check_invariants(run)
        except AssertionError as error:
            check(False, f"the scheduler's state: {error}")
        self.shards_are_readable()

    def committed(self) -> None:
        """Check the events that have become durable."""
        effects, self._uncommitted = self._uncommitted, []
        for effect in effects:
            match effect:
                case SaveStep(state=TaskState.TRAINED):
                    again = effect.step in self._trained
                    self._world.check(not again, f"promise 2: step {effect.step} is committed twice")
                    self._trained.add(effect.step)
                case Rewound():
                    self._world.check(False, f"the run went back from step {effect.committed} to step {effect.step}")
                case _:
                    pass

    def carried_out(self, effect: Effect) -> None:
        """Check the messages that the scheduler sends to other processes."""
        match effect:
            case Answer():
                call = cast(Call, effect.ref)
                if call in self._requests:
                    self._answered(self._requests[call], effect.body)
                self._told(effect, effect.body)
            case SendClear(tracked=True):
                self._covered(effect.tasks)
            case _:
                pass

    def _answered(self, request: Any, body: object) -> None:
        """Check that the sender of a granted request may make this request."""
        check = self._world.check
        if isinstance(request, Complete) and isinstance(body, CompleteAck):
            for task_id, fence in sorted(_done(request, body)):
                self._completed(request, task_id, fence)
        elif isinstance(request, DriverRequest):
            if isinstance(request, GetRunInfo) and request.driver not in self._drivers:
                self._drivers.append(request.driver)
            newest = self._drivers[-1] if self._drivers else 0
            check(request.driver == newest, f"a {type(request).__name__} from a replaced driver is obeyed")

    def _accept(self, request: Complete, answer: CompleteAck) -> None:
        """Note the tasks that a lease's holder has completed.

        The holder might never learn of the acceptance, because the scheduler might be killed first.
        """
        holder, held = self._leases.get(request.lease_id, (0, ()))
        if holder == request.incarnation:
            self._accepted |= {each for each in _done(request, answer) & set(held) if each[1] == self._newest[each[0]]}

    def _completed(self, request: Complete, task_id: str, fence: int) -> None:
        check = self._world.check
        if (task_id, fence) in self._accepted:
            return  # A repeated result changes nothing.
        holder, held = self._leases.get(request.lease_id, (0, ()))
        check(
            holder == request.incarnation, f"{task_id}: a completion was accepted from a process other than the holder"
        )
        check(
            (task_id, fence) in held, f"{task_id}: a completion was accepted under a lease that does not hold the task"
        )
        newest = self._newest.get(task_id, 0)
        check(fence == newest, f"{task_id}: a completion under fence {fence} was accepted; the newest is {newest}")

    def _told(self, effect: Answer, body: object) -> None:
        """Check an answer against all earlier ones."""
        check = self._world.check
        if isinstance(body, StepBatch):
            held = tuple((task.task_id, task.fence) for task in body.batch.tasks)
            known = self.batches.setdefault(body.step, held)
            check(known == held, f"promise 2: step {body.step} had {known} and now has {held}")
            for step, others in self.batches.items():
                both = {each for each, _ in others} & {each for each, _ in held} if step != body.step else set()
                check(not both, f"promise 2: {', '.join(sorted(both))} is in step {step} and in step {body.step}")
            oldest = int(body.scalars["version_min"].min()) if "version_min" in body.scalars else body.step
            bound = body.step - 1 - self._world.scenario.size.staleness
            check(
                oldest >= bound,
                f"step {body.step} trains on samples from version {oldest}, but the oldest allowed is {bound}",
            )
        elif isinstance(body, LeaseGrant):
            call: Any = effect.ref
            held = tuple((task.task_id, task.fence) for task in body.batch.tasks)
            mine = (call.incarnation, held)
            known_lease = self._leases.setdefault(body.lease_id, mine)
            check(known_lease == mine, f"lease {body.lease_id} was {known_lease} and is now {mine}")
            key = (call.incarnation, call.request_id)
            before, self._asked[key] = self._asked.get(key, body.lease_id), body.lease_id
            lives = self._scheduler is not None and self._scheduler._state.run.ledger.leases.get(before) is not None
            text = f"one request was given lease {body.lease_id} although it holds lease {before}"
            check(before == body.lease_id or not lives, text)
            for task_id, fence in held:
                self._newest[task_id] = max(self._newest.get(task_id, 0), fence)
                if body.stage == ROLLOUT.name:
                    first = self._fences.setdefault((task_id, fence), body.lease_id)
                    text = f"fence {fence} of {task_id} was given to lease {first} and to lease {body.lease_id}"
                    check(first == body.lease_id, text)

    def _covered(self, tasks: list[PutTask]) -> None:
        """Check that a trained task is collected only once recovery cannot return to a point before the task's step."""
        keeps, kept = self._world.scenario.size.keeps, self.saved_steps()
        covered = kept[-keeps:][0] if kept else 0
        for step, batch in self.batches.items():
            for each in tasks:
                self._world.check(
                    step <= covered or (each.task_id, each.fence) not in batch,
                    f"{each.task_id} of step {step} is collected, but recovery can still return to step {covered}",
                )

    def saved_steps(self) -> list[int]:
        """Return the steps of which every trained model has a checkpoint, ascending."""
        models = topology_of(self._world.scenario.size).trained
        folders = [model.checkpoints(self._world.run_dir.checkpoints) for model in models]
        return sorted(set.intersection(*(set(checkpoint_steps(folder)) for folder in folders)))

    # ---- the store

    def clearing(self, tasks: list[PutTask]) -> None:
        """Note that the store is about to collect shards, which may be gone from now on."""
        self._nothing_leased(tasks)
        for task_id, fence in list(self._puts):
            if any(each.task_id == task_id and each.fence >= fence for each in tasks):
                del self._puts[task_id, fence]

    def _nothing_leased(self, tasks: list[PutTask]) -> None:
        if self._scheduler is None or not hasattr(self._scheduler, "_state"):
            return
        for lease in self._scheduler._state.run.ledger.leases:
            for task in lease.tasks.values():
                for each in tasks:
                    self._world.check(
                        each.task_id != task.task_id or each.fence < task.fence,
                        f"promise 3: {each.task_id} is collected under fence {each.fence}, and lease {lease.lease_id} "
                        f"holds fence {task.fence}",
                    )

    def sealed(self, store: StoreService, put_id: str) -> None:
        """Note that a put is about to be acknowledged."""
        table = store.index.sealed(put_id).table if put_id in store.index._sealed else None
        if table is not None:
            self._puts |= dict.fromkeys(zip(table.task_ids, table.fences, strict=True), put_id)

    def acknowledged(self, tasks: list[PutTask]) -> None:
        """Note that the store has acknowledged a clear."""
        for task in tasks:
            self._collected(task.task_id, task.fence)
        self.store_is_sound()

    def _collected(self, task_id: str, fence: int) -> None:
        self._cleared[task_id] = max(self._cleared.get(task_id, 0), fence)

    def store_is_sound(self) -> None:
        """Check promise 4, and that collected shards do not return."""
        store = self._store
        if store is None:
            return
        room = store.index.room
        for tier in Tier:
            self._world.check(
                room.used[tier] <= room.limits[tier],
                f"promise 4: {room.used[tier]} of {room.limits[tier]} bytes are used",
            )
        if not store._scanned.is_set():
            return
        page, _ = store.index.inventory(0)
        there = {(each.task_id, each.fence) for each in page}
        for put in self._puts:
            self._world.check(put in there, f"promise 1: the acknowledged put of {put} cannot be read")
        for each in page:
            self._world.check(
                self._cleared.get(each.task_id, -1) < each.fence,
                f"promise 3: {each.task_id} can be read under fence {each.fence} after its collection",
            )

    def shards_are_readable(self) -> None:
        """Check promise 1: the store has all shards that the scheduler has accepted but not ordered to be collected."""
        if self._store is None or self._scheduler is None or not self._store._scanned.is_set():
            return
        for task in self._scheduler._state.run.ledger.tasks:
            if task.made and not task.clears:
                try:
                    self._store.index.locate([PutTask(task.task_id, task.fence)])
                except RpcError as error:
                    self._world.check(False, f"promise 1: {task.task_id}, {task.state}: {error}")

    # ---- the end

    def at_end(self) -> None:
        """Check the state that a finished run has left behind."""
        world = self._world
        run, steps = world.run_dir, world.scenario.size.steps
        if not world.scenario.size.trains:
            [row] = [json.loads(line) for line in run.metrics.read_text().splitlines()]
            world.check((row["step"], row["eval/heldout/rows_scored"]) == (0, 2), f"the evaluation's row is {row}")
            world.check(
                not run.export.exists() and not checkpoint_steps(run.checkpoints), "an evaluation saved a model"
            )
            return
        with closing(sqlite3.connect(run.journal)) as journal:
            rows = journal.execute("SELECT step, task_ids FROM steps WHERE state = 'TRAINED' ORDER BY step").fetchall()
        world.check([step for step, _ in rows] == list(range(1, steps + 1)), f"the journal has steps {rows}")
        batches = [sorted(json.loads(ids)) for _, ids in rows]
        chains = [self._model_at_end(model, batches) for model in topology_of(world.scenario.size).trained]
        self.chain = digest(*chains)
        lines = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
        first = 0 if world.scenario.size.evaluates else 1
        world.check(lines == list(range(first, steps + 1)), f"metrics.jsonl has rows for steps {lines}")
        world.check(steps in self.saved_steps(), "the last step has no checkpoint of every model")

    def _model_at_end(self, model: TrainedModel, batches: list[list[str]]) -> int:
        """Check the tasks that a model was trained on, in steps with `batches`, and return its weights."""
        chain, _, applied = (model.exported(self._world.run_dir.path) / NAME).read_text().partition(" ")
        trained = [task_of(int(number)) for number in applied.split(",") if number]
        at = 0
        for step, ids in enumerate(batches, 1):
            mine = sorted(trained[at : at + len(ids)])
            text = f"promise 2: the {model.name} should have trained {ids} in step {step}, but trained {mine}"
            self._world.check(mine == ids, text)
            at += len(ids)
        self._world.check(at == len(trained), f"promise 2: the {model.name} also trained {trained[at:]}")
        return int(chain)


def _done(request: Complete, answer: CompleteAck) -> set[tuple[str, int]]:
    """Return the tasks and fences of the accepted results."""
    refused = {(each.task_id, each.fence) for each in answer.refused}
    return {(each.task_id, each.fence) for each in request.results if each.outcome == Outcome.DONE} - refused


def _close_scheduler(service: SchedulerService) -> None:
    if hasattr(service, "_journal"):
        service._journal.close()
    if hasattr(service, "_metrics"):
        _quietly(service._metrics.close)


def _close_store(service: StoreService) -> None:
    _quietly(service._files.close)


def _quietly(close: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # The process itself has already closed the file.
        close()
