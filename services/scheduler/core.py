"""The durable state of a run: everything that a journal rebuilds. Pure: no clock, no I/O, no open calls.

Each public verb is one durable event. It checks first and raises RpcError before it has changed anything, so that a
refused request leaves no trace. Replaying the same verbs in the same order gives the same state, bit for bit; hence
nothing here looks at heartbeats, time or who waits (that is `state.py`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from proto import codec
from proto.messages import (
    BatchMeta,
    BatchPart,
    CheckpointSaved,
    CommitStep,
    Complete,
    ErrorCode,
    FinishRun,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    Outcome,
    PublishWeights,
    PutTask,
    Refusal,
    Register,
    RunInfo,
    StepBatch,
    TaskHandle,
    TaskResult,
    WeightsRef,
)
from proto.tensors import Array
from services.scheduler import scalars
from services.scheduler.admission import Window
from services.scheduler.collection import ClearQueues
from services.scheduler.evaluations import Evaluation, Evaluations
from services.scheduler.events import (
    Cleared,
    Configure,
    Durable,
    Effect,
    Leased,
    LeaseExpired,
    SaveEval,
    SaveStep,
    Tell,
    WriteRow,
)
from services.scheduler.leases import Holder, Lease, Leases
from services.scheduler.plan import EpochOrder, Plan, due, stage_index
from services.scheduler.tasks import EVALUATION, NO_SLOT, TaskState, TaskTable
from services.scheduler.versions import Versions
from shared.rpc.errors import RpcError
from shared.rundir import service_name
from shared.stages import TRAIN, WEIGHTS

STORE = "batch-store"
FAILURE = 4
"""What one failed attempt costs a task ..."""
DEATH = 1
"""... and what the death of its holder costs: a killed process is rarely the task's fault, a task that always kills
its process still ends after `FAILURE` times as many deaths as attempts."""
_TRAIN_SPLIT = 0


class Core:
    """Tasks, leases, versions, evaluations and steps of one run. `out` collects the effects of the verbs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.order = EpochOrder(plan)
        self.out: list[Effect] = []
        self.tasks = TaskTable(len(plan.stages), [TRAIN, *(each.name for each in plan.evals)])
        self.window = Window()
        self.leases = Leases()
        self.clears = ClearQueues()
        self.versions = Versions()
        self.evaluations = Evaluations()
        self.ready: list[list[int]] = [[] for _ in plan.stages]
        """Heaps of admission numbers that wait for a lease, by stage; stale entries are skipped when popped."""
        makers = {key: i for i, stage in enumerate(plan.stages) for key in stage.makes}
        self._needed = [sum({1 << makers[key] for key in stage.needs}) for stage in plan.stages]
        """By stage: bits of the stages that make what it needs."""
        self.registry: dict[Holder, Register] = {}
        self.store_names: list[str] = []
        self.layouts: list[scalars.Layout] = []
        self.config = Configure(steps=0, attempts=3, keep_last=2, collect_at_commit=False)
        self.batches: dict[int, list[int]] = {}
        """Slots of each journaled step, in batch order, until they are collected."""
        self.driver = 0
        self.old_drivers: list[int] = []
        self.lineage = 0
        self.batched_step = 0
        self.committed_step = 0
        self.checkpoint_step = -1
        self.finished = False
        self.position = 0
        self.uncovered_bytes = 0
        """Bytes of trained tasks that wait for a checkpoint."""
        self.dropped = 0
        self.dropped_reported = 0
        self.waiting_rows: dict[int, dict[str, float]] = {}
        self.next_row = 0 if plan.evals else 1

    def apply(self, event: Durable) -> Any:
        """Carry out one durable event, live or replayed; returns what the verb returns.

        Raises RpcError, without any change, when the event is refused. None and False mean: no change, not to be
        journaled.
        """
        result = self._dispatch(event)
        if result is not None and result is not False:
            self._admit()
        return result

    def apply_lease(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """What `apply(Leased(...))` does, for a request that is not packed."""
        grant = self.lease(request, call)
        if grant is not None:
            self._admit()
        return grant

    def _dispatch(self, event: Durable) -> Any:
        match event:
            case Leased():
                return self.lease(cast(LeaseRequest, codec.decode_body(LeaseRequest.TYPE, event.request)), event.call)
            case Complete():
                return self.complete(event)
            case Cleared():
                return self.cleared(event.store, event.count)
            case LeaseExpired():
                return self.expire(event.lease_id)
            case NextBatch():
                return self.form_batch(event)
            case CommitStep():
                return self.commit(event)
            case PublishWeights():
                return self.publish(event)
            case CheckpointSaved():
                return self.checkpoint(event)
            case GetRunInfo():
                return self.run_info(event)
            case Register():
                return self.register(event)
            case Configure():
                return self.configure(event)
            case FinishRun():
                return self.finish(event)
        raise TypeError(f"{type(event).__name__} is not a durable event")

    # ---------------------------------------------------------------------------------------------- start

    def configure(self, event: Configure) -> bool:
        self.config = event
        self._write_rows()
        return True

    def register(self, request: Register) -> bool:
        """A new life of an instance: its former life's leases go to others at once."""
        holder = (request.service, request.instance)
        old = self.registry.get(holder)
        self.registry[holder] = request
        if old is None or old.incarnation != request.incarnation:
            for lease in self.leases.held_by(holder):
                if lease.incarnation != request.incarnation:
                    self._give_up(lease, DEATH)
        if request.service == STORE:
            self.clears.add_store(service_name(*holder))
        return True

    @property
    def limit_bytes(self) -> int:
        return sum(row.limit_bytes for (service, _), row in self.registry.items() if service == STORE)

    # ---------------------------------------------------------------------------------------------- leases

    def stage(self, request: LeaseRequest) -> int:
        """Index of the stage a request is about. Raises RpcError when it cannot be served, ever."""
        stage = stage_index(self.plan, request.stage)
        if stage < 0:
            known = ", ".join(each.name for each in self.plan.stages)
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: this run has {known}")
        if request.max_tasks < 1:
            raise RpcError(ErrorCode.BAD_REQUEST, f"max_tasks {request.max_tasks}: ask for 1 or more")
        return stage

    def lease(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        """Give a block of tasks, the oldest first; None (and no change) when there is nothing to give."""
        stage = self.stage(request)
        if self.finished:
            return None
        if stage > 0:
            slots = self._pop_ready(stage, request.max_tasks)
            return self._grant(stage, request, call, slots, None) if slots else None
        return self._lease_evaluation(request, call) or self._lease_rollout(request, call)

    def _lease_evaluation(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        for one in self.evaluations.open.values():
            if one.waiting:
                most = request.max_tasks
                if self.plan.block_rows:
                    most = min(most, max(self.plan.block_rows // one.samples, 1))
                slots = [one.waiting.popleft() for _ in range(min(most, len(one.waiting)))]
                return self._grant(0, request, call, slots, one.version)
        return None

    def _lease_rollout(self, request: LeaseRequest, call: tuple[int, int]) -> LeaseGrant | None:
        first = self._peek(0)
        if first is None:
            return None
        step = self._step_of(first)
        oldest = max(0, step - 1 - self.plan.staleness)
        if self.plan.deterministic:
            version = self.versions.at_step(oldest)
        else:
            version = self.versions.newest
            if version is not None and version[1] < oldest:
                version = None
        if version is None:
            return None
        slots = self._pop_ready(0, request.max_tasks)
        return self._grant(0, request, call, slots, version)

    def _step_of(self, admission: int) -> int:
        """The step that will consume this task, or an earlier one if tasks before it are dropped later."""
        return self.batched_step + 1 + self.window.rank(admission) // self.plan.tasks_per_step

    def _peek(self, stage: int) -> int | None:
        """The oldest admission number that waits for `stage`."""
        heap = self.ready[stage]
        while heap:
            if self._waits(stage, heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _waits(self, stage: int, admission: int) -> bool:
        if admission < self.window.head:
            return False
        slot = self.window.slot(admission)
        if slot < 0 or self.tasks.lease[slot] or self.tasks.done[slot] >> stage & 1:
            return False
        return stage == 0 or self.tasks.done[slot] & self._needed[stage] == self._needed[stage]

    def waiting_for(self, stage: int) -> list[int]:
        """Admission numbers that wait for `stage`, in order; sorted, so a heap as well."""
        return sorted({admission for admission in self.ready[stage] if self._waits(stage, admission)})

    def _pop_ready(self, stage: int, most: int) -> list[int]:
        """Up to `most` waiting tasks, oldest first; for the rollout stage all of one step (and, in deterministic
        mode, of one fixed block)."""
        slots: list[int] = []
        group = -1
        while len(slots) < most:
            admission = self._peek(stage)
            if admission is None:
                break
            if stage == 0:
                block = admission // self.plan.block_tasks if self.plan.deterministic else 0
                key = self._step_of(admission) << 32 | block
                if group not in (-1, key):
                    break
                group = key
            heapq.heappop(self.ready[stage])
            slot = self.window.slot(admission)
            self.tasks.lease[slot] = self.leases.next_id
            slots.append(slot)
        return slots

    def _grant(
        self,
        stage: int,
        request: LeaseRequest,
        call: tuple[int, int],
        slots: list[int],
        version: tuple[int, int] | None,
    ) -> LeaseGrant:
        holder = (request.service, request.instance)
        lease = self.leases.add(stage, holder, request.incarnation, slots, version, call)
        for slot in slots:
            self.tasks.lease[slot] = lease.lease_id
            if stage == 0:
                self.tasks.move(slot, TaskState.LEASED)
        return self.describe(lease)

    def describe(self, lease: Lease, lease_s: float = 0.0) -> LeaseGrant:
        """The grant of a live lease, again the same for a retry (`lease_s` is filled in by `state.py`)."""
        stage = self.plan.stages[lease.stage]
        slots = [slot for slot in lease.slots if self.tasks.lease[slot] == lease.lease_id]
        split = self.tasks.split[slots[0]] if slots else _TRAIN_SPLIT
        evaluation = next(
            (e for e in self.evaluations.open.values() if e.split == split and e.version == lease.version), None
        )
        exact = self.plan.deterministic or evaluation is not None
        oldest = 0
        if lease.version is not None and slots:
            oldest = lease.version[1]
            if not exact:
                oldest = max(0, self._step_of(self.tasks.admission[slots[0]]) - 1 - self.plan.staleness)
        return LeaseGrant(
            lease_id=lease.lease_id,
            stage=stage.name,
            split=self.tasks.splits[split],
            lease_s=lease_s,
            batch=self.meta(slots, needs=stage.needs),
            min_step=oldest,
            exact=exact and lease.stage == 0,
            group_size=evaluation.samples if evaluation else self.plan.group_size,
            block_rows=self.plan.block_rows if lease.stage == 0 else 0,
            weights=self.versions.get(lease.version) if lease.version is not None else None,
        )

    def meta(self, slots: Iterable[int], *, needs: tuple[str, ...] | None = None) -> BatchMeta:
        """Handles of tasks; parts are the stages that make a key of `needs` (None: all that are leased stages)."""
        used = [
            i for i, stage in enumerate(self.plan.stages) if needs is None or any(key in needs for key in stage.makes)
        ]
        table = self.tasks
        handles = [
            TaskHandle(
                table.task_id(slot),
                table.fence[slot],
                table.samples[slot],
                table.tokens[slot],
                table.nbytes[slot],
                [table.store[i][slot] for i in used],
            )
            for slot in slots
        ]
        parts = [BatchPart(self.plan.stages[i].name, list(self.plan.stages[i].makes)) for i in used]
        return BatchMeta(tasks=handles, parts=parts, stores=list(self.store_names) if used else [])

    def expire(self, lease_id: int) -> bool:
        """No progress: the tasks go back, and it counts as a failed attempt of theirs."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            self._give_up(lease, FAILURE)
        return lease is not None

    def _give_up(self, lease: Lease, cost: int) -> None:
        for slot in lease.slots:
            if self.tasks.lease[slot] == lease.lease_id:
                self._retry(slot, cost, f"lease of {service_name(*lease.holder)} was lost")
        self.leases.remove(lease)
        self._free_versions()

    # ---------------------------------------------------------------------------------------------- results

    def complete(self, request: Complete) -> list[Refusal]:
        """Accept results; returns those that are refused."""
        lease = self.leases.get(request.lease_id)
        if lease is not None and lease.incarnation != request.incarnation:
            lease = None
        stage = stage_index(self.plan, request.stage)
        self._check_scalars(request, stage)
        layout = self._layout(request.scalars) if stage == 0 else 0
        refused: list[Refusal] = []
        first = 0
        for result in request.results:
            slot = self.tasks.find(result.task_id)
            problem = self._problem(slot, stage, lease, result)
            if problem is not None:
                refused.append(Refusal(result.task_id, result.fence, *problem))
            elif lease is not None and not self.tasks.done[slot] >> stage & 1:
                lease.open -= 1
                if result.outcome == Outcome.DONE:
                    packed = scalars.pack(request.scalars, first, result.samples) if stage == 0 else None
                    self._accept(slot, stage, result, layout, packed)
                elif result.outcome == Outcome.RETRY:
                    self._retry(slot, FAILURE, result.reason)
                else:
                    self._drop(slot, result.reason)
            first += result.samples if result.outcome == Outcome.DONE else 0
        if lease is not None:
            if request.final and lease.open:
                self._give_up(lease, DEATH)
            elif not lease.open:
                self.leases.remove(lease)
            self._free_versions()
        return refused

    def _check_scalars(self, request: Complete, stage: int) -> None:
        if stage < 0:
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage!r}: not in this run's graph")
        if stage > 0 and request.scalars:
            raise RpcError(ErrorCode.BAD_REQUEST, f"stage {request.stage}: only the rollout stage brings scalars")
        samples = sum(result.samples for result in request.results if result.outcome == Outcome.DONE)
        for name, values in request.scalars.items():
            if values.shape != (samples,):
                raise RpcError(
                    ErrorCode.BAD_REQUEST,
                    f"scalar {name!r} of shape {list(values.shape)}: the results have {samples} samples in all",
                )

    def _layout(self, columns: dict[str, Array]) -> int:
        layout = scalars.layout_of(columns)
        if layout not in self.layouts:
            self.layouts.append(layout)
        return self.layouts.index(layout)

    def _problem(self, slot: int, stage: int, lease: Lease | None, result: TaskResult) -> tuple[str, str] | None:
        """Why a result is refused: `(code, message)`, or None."""
        if slot == NO_SLOT:
            return ErrorCode.COLLECTED, f"{result.task_id}: collected, or never admitted"
        fence = self.tasks.fence[slot]
        if result.fence < fence:
            return ErrorCode.COLLECTED, f"{result.task_id}: fence {result.fence} is over, it stands at {fence}"
        if result.fence > fence:
            return ErrorCode.CONFLICT, f"{result.task_id}: fence {result.fence} was never given, it stands at {fence}"
        if self.tasks.done[slot] >> stage & 1:
            if result.outcome == Outcome.DONE and self.tasks.hash[stage][slot] == result.content_hash:
                return None
            return ErrorCode.CONFLICT, f"{result.task_id}: fence {fence} was accepted with other content"
        if self.tasks.state[slot] == TaskState.DROPPED:
            return ErrorCode.COLLECTED, f"{result.task_id}: dropped"
        if lease is None or self.tasks.lease[slot] != lease.lease_id:
            return ErrorCode.LOST, f"{result.task_id}: the lease is no longer held"
        return None

    def _accept(self, slot: int, stage: int, result: TaskResult, layout: int, packed: bytes | None) -> None:
        table = self.tasks
        table.lease[slot] = 0
        table.done[slot] |= 1 << stage
        table.store[stage][slot] = self._store_index(result.store)
        table.hash[stage][slot] = result.content_hash
        table.nbytes[slot] += result.nbytes
        if stage == 0:
            table.samples[slot] = result.samples
            table.failed[slot] = result.samples_failed
            table.tokens[slot] = result.tokens
            table.scalars[slot] = layout.to_bytes(2, "little") + (packed or b"")
        if table.admission[slot] == EVALUATION:
            self._score(slot)
            return
        if stage == 0 and result.samples < min(2, self.plan.group_size):
            self._drop(slot, f"{result.samples} of {self.plan.group_size} samples are left")
            return
        table.move(slot, TaskState.ROLLED_OUT)
        if table.done[slot] == (1 << len(self.plan.stages)) - 1:
            table.move(slot, TaskState.READY)
            self.window.mark_ready(table.admission[slot])
            return
        for later in range(1, len(self.plan.stages)):
            needed = self._needed[later]
            if needed >> stage & 1 and table.done[slot] & needed == needed:
                heapq.heappush(self.ready[later], table.admission[slot])

    def _store_index(self, store: str) -> int:
        if store not in self.store_names:
            self.store_names.append(store)
        return self.store_names.index(store)

    def _retry(self, slot: int, cost: int, reason: str) -> None:
        """An attempt is over without a result: tombstone its fence, back to PENDING, or dropped after too many."""
        failures = self.tasks.failures[slot] + cost
        if failures >= FAILURE * self.config.attempts:
            self._drop(slot, f"{self.config.attempts} attempts failed, the last: {reason}")
            return
        self.tasks.failures[slot] = failures
        self.clears.push(self.tasks.task_id(slot), self.tasks.fence[slot], last=False)
        self.tasks.reset_attempt(slot)
        admission = self.tasks.admission[slot]
        if admission == EVALUATION:
            self._evaluation_of(slot).waiting.append(slot)
        else:
            heapq.heappush(self.ready[0], admission)

    def _drop(self, slot: int, reason: str) -> None:
        """The task can never be trained on or scored."""
        task_id = self.tasks.task_id(slot)
        self.tasks.move(slot, TaskState.DROPPED)
        self.out.append(Tell("scheduler/dropped", {"task": task_id, "reason": reason[:200]}))
        if self.tasks.admission[slot] == EVALUATION:
            one = self._evaluation_of(slot)
            one.dropped += 1
            self._end_of_evaluation_task(one)
        else:
            self.dropped += 1
            self.window.mark_dropped(self.tasks.admission[slot])
        self._collect(slot)

    # ---------------------------------------------------------------------------------------------- evaluations

    def _evaluation_of(self, slot: int) -> Evaluation:
        return self.evaluations.open[self.tasks.splits[self.tasks.split[slot]], self.tasks.epoch[slot]]

    def _open_evaluations(self, version: tuple[int, int]) -> None:
        for each in due(self.plan, self.config.steps, version[1]):
            if self.evaluations.known(each.name, version[1]):
                continue
            split = self.tasks.splits.index(each.name)
            one = Evaluation(each.name, split, version, len(each.rows), each.samples)
            self.evaluations.open[each.name, version[1]] = one
            one.waiting = deque(self.tasks.add(split, version[1], row, EVALUATION) for row in each.rows)

    def _score(self, slot: int) -> None:
        one = self._evaluation_of(slot)
        packed = self.tasks.scalars[slot] or b"\0\0"
        layout = self.layouts[int.from_bytes(packed[:2], "little")]
        rewards = scalars.column(layout, "reward", self.tasks.samples[slot], packed[2:])
        if rewards is None or not len(rewards):
            self._drop(slot, "no sample was scored")
            return
        rows = next(each.rows for each in self.plan.evals if each.name == one.name)
        one.scores[bisect_left(rows, self.tasks.index[slot])] = float(np.mean(rewards, dtype=np.float64))
        self.tasks.move(slot, TaskState.SCORED)
        self._end_of_evaluation_task(one)
        self._collect(slot)

    def _end_of_evaluation_task(self, one: Evaluation) -> None:
        one.left -= 1
        if one.left:
            return
        self.evaluations.finish(one)
        step = one.version[1]
        scored = len(one.scores) - one.dropped
        self.out.append(SaveEval(one.name, step, one.accuracy, scored, one.dropped))
        self.out.append(Tell("eval", {"step": step, f"eval/{one.name}/accuracy": one.accuracy}))
        self._write_rows()

    def evaluated(self, step: int) -> dict[str, float] | None:
        """Results of the evaluations due at version `step`; None while some are missing."""
        done = self.evaluations.done.get(step, {})
        wanted = [each.name for each in due(self.plan, self.config.steps, step)]
        return {name: done[name] for name in wanted} if all(name in done for name in wanted) else None

    # ---------------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Admit train tasks up to the bound of DESIGN, while there is room for all the bytes they may need."""
        left = (self.config.steps - self.batched_step) * self.plan.tasks_per_step
        bound = min(self.plan.max_live - self._open_batch_tasks(), left)
        while self.window.live < bound and self._fits(1):
            epoch, row = self.order.at(self.position)
            self.position += 1
            slot = self.tasks.add(_TRAIN_SPLIT, epoch, row, self.window.tail)
            heapq.heappush(self.ready[0], self.window.admit(slot))

    def _open_batch_tasks(self) -> int:
        return len(self.batches.get(self.batched_step, ())) if self.batched_step > self.committed_step else 0

    def _fits(self, more: int) -> bool:
        if not self.plan.task_bytes:
            return True
        live = self.window.live + self._open_batch_tasks() + more
        return self._weight_bytes() + self.uncovered_bytes + live * self.plan.task_bytes <= self.limit_bytes

    def _weight_bytes(self) -> int:
        newest = self.versions.newest_ref
        return max(self.versions.nbytes, self.plan.weight_versions * newest.nbytes if newest else 0)

    def _wants_checkpoint(self, batch_bytes: int) -> bool:
        """Whether the trained bytes that no checkpoint covers are about to be in the way of admission."""
        if not self.plan.task_bytes or self.config.collect_at_commit:
            return False
        spare = self.limit_bytes - self._weight_bytes() - self.plan.max_live * self.plan.task_bytes
        return self.uncovered_bytes + batch_bytes > 0.8 * spare

    # ---------------------------------------------------------------------------------------------- the driver

    def check_driver(self, driver: int) -> None:
        if driver != self.driver:
            raise RpcError(ErrorCode.CONFLICT, f"driver {driver}: a newer driver has taken over, or GetRunInfo is due")

    def run_info(self, request: GetRunInfo) -> RunInfo:
        """A driver takes the run over; with `reload` a new lineage begins."""
        if request.driver in self.old_drivers:
            raise RpcError(ErrorCode.CONFLICT, f"driver {request.driver}: a newer driver has taken over")
        if request.driver != self.driver:
            if self.driver:
                self.old_drivers.append(self.driver)
            self.driver = request.driver
        if request.reload:
            self.lineage += 1
        return RunInfo(
            steps=self.config.steps,
            committed_step=self.committed_step,
            open_step=self.batched_step if self.batched_step > self.committed_step else 0,
            lineage=self.lineage,
            checkpoint_step=self.checkpoint_step,
            stopping=self.finished,
        )

    def batch(self, request: NextBatch) -> StepBatch | None:
        """The batch of a journaled step, always the same; None when the step is not journaled. Changes nothing."""
        self.check_driver(request.driver)
        step = request.step
        if not 1 <= step <= self.config.steps:
            raise RpcError(ErrorCode.BAD_REQUEST, f"step {step}: this run has steps 1..{self.config.steps}")
        if step > self.batched_step:
            if step != self.committed_step + 1:
                raise RpcError(ErrorCode.CONFLICT, f"step {step}: the next step is {self.committed_step + 1}")
            return None
        slots = self.batches.get(step)
        if slots is None:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"step {step}: its tasks were collected, it cannot be replayed; load a later checkpoint "
                "(gc.after: checkpoint keeps what replay needs)",
            )
        return self._step_batch(step, slots)

    def form_batch(self, request: NextBatch) -> StepBatch | None:
        """Consume the oldest tasks for the next step; None (and no change) while the oldest are not ready."""
        if self.window.ready < self.plan.tasks_per_step:
            return None
        slots = self.window.take(self.plan.tasks_per_step)
        for slot in slots:
            self.tasks.move(slot, TaskState.BATCHED)
            self.tasks.step[slot] = request.step
        self.batches[request.step] = slots
        self.batched_step = request.step
        self.out.append(SaveStep(request.step, "BATCHED", [self.tasks.task_id(slot) for slot in slots], {}))
        batch = self._step_batch(request.step, slots)
        self.dropped_reported = self.dropped
        self._free_versions()
        return batch

    def _step_batch(self, step: int, slots: list[int]) -> StepBatch:
        packed = [self.tasks.scalars[slot] or b"\0\0" for slot in slots]
        columns = scalars.flatten(
            self.layouts,
            [
                (int.from_bytes(data[:2], "little"), self.tasks.samples[slot], data[2:])
                for slot, data in zip(slots, packed, strict=True)
            ],
        )
        rewards = columns.get("reward")
        return StepBatch(
            step=step,
            batch=self.meta(slots),
            scalars=columns,
            reward_mean_unfiltered=float(np.mean(rewards, dtype=np.float64))
            if rewards is not None and len(rewards)
            else 0.0,
            samples_failed=sum(self.tasks.failed[slot] for slot in slots),
            dropped=self.dropped - self.dropped_reported if step == self.batched_step else 0,
            checkpoint_now=self._wants_checkpoint(sum(self.tasks.nbytes[slot] for slot in slots)),
        )

    def commit(self, request: CommitStep) -> bool:
        """The step's tasks are TRAINED, exactly once. False (and no change): it was committed before."""
        self.check_driver(request.driver)
        if request.step <= self.committed_step:
            return False
        if request.step != self.batched_step:
            raise RpcError(
                ErrorCode.CONFLICT,
                f"commit of step {request.step}: {self.committed_step} is committed, "
                f"the open step is {self.batched_step if self.batched_step > self.committed_step else 'none'}",
            )
        self.committed_step = request.step
        for slot in self.batches[request.step]:
            self.tasks.move(slot, TaskState.TRAINED)
            self.uncovered_bytes += self.tasks.nbytes[slot]
        self.out.append(SaveStep(request.step, "TRAINED", None, request.metrics))
        if self.config.collect_at_commit:
            self._collect_steps(request.step)
        row = {"policy/version": float(request.step), **request.metrics, "gc/tasks": float(self.clears.collected)}
        self.waiting_rows[request.step] = row
        self._write_rows()
        self._free_versions()
        return True

    def publish(self, request: PublishWeights) -> bool:
        """A version can be loaded; evaluations of it begin."""
        self.check_driver(request.driver)
        ref = request.ref
        if ref.lineage != self.lineage:
            raise RpcError(ErrorCode.CONFLICT, f"weights of lineage {ref.lineage}: this driver has {self.lineage}")
        old = self.versions.get((ref.lineage, ref.step))
        if old is not None and old.fence > ref.fence:
            raise RpcError(ErrorCode.CONFLICT, f"{ref.task_id}: fence {ref.fence} is over, it stands at {old.fence}")
        self.versions.put(ref)
        if old is not None and old.fence < ref.fence:
            self._clear_weights(old)
        self._open_evaluations((ref.lineage, ref.step))
        if ref.step == 0 and self.next_row == 0:
            self.waiting_rows.setdefault(0, {"policy/version": 0.0})
        self._write_rows()
        self._free_versions()
        return True

    def checkpoint(self, request: CheckpointSaved) -> bool:
        """Collect what the oldest checkpoint that recovery may fall back to covers."""
        self.check_driver(request.driver)
        kept = sorted({*request.kept, request.step})[-self.config.keep_last :]
        self.checkpoint_step = kept[-1]
        if len(kept) == self.config.keep_last or kept[0] > 0:
            self._collect_steps(kept[0])
        if self._wants_checkpoint(0):
            # No room for one more interval of replay: give up the older checkpoint's rather than stand still.
            self._collect_steps(kept[-1])
        return True

    def finish(self, request: FinishRun) -> bool:
        """The run is complete: no more leases."""
        self.check_driver(request.driver)
        self.finished = True
        return True

    # ---------------------------------------------------------------------------------------------- collection

    def _collect_steps(self, last: int) -> None:
        for step in [step for step in self.batches if step <= min(last, self.committed_step)]:
            for slot in self.batches.pop(step):
                self.uncovered_bytes -= self.tasks.nbytes[slot]
                self._collect(slot)

    def _collect(self, slot: int) -> None:
        """Tombstone at every store; COLLECTED when all have acknowledged."""
        self.tasks.lease[slot] = 0
        waits = self.clears.push(self.tasks.task_id(slot), self.tasks.fence[slot], last=True)
        self.tasks.clears[slot] = waits
        if not waits:
            self._collected(slot)

    def _collected(self, slot: int) -> None:
        self.clears.collected += 1
        self.tasks.remove(slot)

    def cleared(self, store: str, count: int) -> bool:
        """A store has acknowledged the first `count` clears of its queue."""
        for task_id, _, last in self.clears.pop(store, count):
            slot = self.tasks.find(task_id)
            if last and slot != NO_SLOT:
                self.tasks.clears[slot] -= 1
                if not self.tasks.clears[slot]:
                    self._collected(slot)
        return True

    def _free_versions(self) -> None:
        if len(self.versions) < 2:
            return
        named = self.leases.versions() | self.evaluations.named()
        oldest = max(0, self.batched_step - self.plan.staleness) if self.plan.deterministic else None
        for ref in self.versions.unnamed(named, oldest):
            self._clear_weights(ref)

    def _clear_weights(self, ref: WeightsRef) -> None:
        self.clears.push(ref.task_id, ref.fence, last=False)

    def is_stray(self, entry: PutTask) -> bool:
        """Whether a store holds something that is neither accepted, nor under a live lease, nor a live version."""
        split, epoch, index = entry.task_id.rsplit("/", 2)
        if split == WEIGHTS:
            version = (int(epoch), int(index))
            ref = self.versions.get(version)
            if ref is not None:
                return entry.fence < ref.fence
            newest = self.versions.newest
            # a version that is put and not yet published is of the driver's lineage and not older than the newest
            return newest is not None and (version[0] < self.lineage or version < newest)
        slot = self.tasks.find(entry.task_id)
        return slot == NO_SLOT or entry.fence < self.tasks.fence[slot]

    # ---------------------------------------------------------------------------------------------- metrics

    def _write_rows(self) -> None:
        """Let rows leave in step order, each with the evaluations due at its version."""
        while self.next_row in self.waiting_rows:
            results = self.evaluated(self.next_row)
            if results is None:
                return
            row = self.waiting_rows.pop(self.next_row)
            full = {"step": float(self.next_row), **row}
            full.update({f"eval/{name}/accuracy": accuracy for name, accuracy in results.items()})
            self.out.append(WriteRow(self.next_row, full))
            self.next_row += 1
