"""The durable state of a run: everything that the journal rebuilds. It has no clock, no I/O and no open calls.

Three owners hold the state: `StoredShards` knows the stores and their clears, `RunHistory` the steps, versions and
evaluations, and `TaskLedger`, which uses the other two, the tasks and their leases. Only an owner's own methods change
its fields. The rules for a subject that concerns several owners are functions in a module named after the subject.

An event that is refused raises RpcError before it changes anything. Applying the same events in the same order produces
the same state, bit for bit. Heartbeats, time and waiting calls are therefore handled in `state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never, cast

from proto import codec
from proto.messages import (
    Ack,
    CheckpointSaved,
    CommitStep,
    Complete,
    CompleteAck,
    FinishRun,
    GetRunInfo,
    LeaseGrant,
    LeaseRequest,
    NextBatch,
    PublishWeights,
    Register,
    RunInfo,
    StepBatch,
    TaskState,
)
from services.scheduler import completion, leasing, recovery, steps
from services.scheduler.events import (
    Cleared,
    Configure,
    Durable,
    Effect,
    Leased,
    LeaseExpired,
    SamplesTaken,
    ShardsLost,
    StoreGone,
    TailLost,
)
from services.scheduler.history import RunHistory
from services.scheduler.leases import CallId
from services.scheduler.ledger import TaskLedger
from services.scheduler.orders import order_of
from services.scheduler.plan import Plan
from services.scheduler.shards import StoredShards
from services.scheduler.tasks import Task, Transition

Reply = LeaseGrant | CompleteAck | StepBatch | RunInfo | Ack
_LEASABLE = frozenset({TaskState.LEASED, TaskState.ROLLED_OUT})
_UNFINISHED = frozenset({TaskState.PENDING, TaskState.LEASED, TaskState.ROLLED_OUT, TaskState.READY})
_ACKNOWLEDGING = frozenset({TaskState.TRAINED, TaskState.SCORED, TaskState.DROPPED})


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of an event: the reply to its sender, and the effects.

    Without a reply, nothing changed, so the event is not journaled.
    """

    reply: Reply | None
    effects: list[Effect]


class RunState:
    """The three owners of the state of one run, and the way of each event to them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.shards = StoredShards(plan)
        self.history = RunHistory(plan)
        self.ledger = TaskLedger(plan, order_of(plan), self.history, self.shards)

    # ---- events

    def apply(self, event: Durable) -> Applied:
        """Apply one durable event, live or replayed. Raises RpcError, and changes nothing, if the event is refused."""
        if isinstance(event, Leased):
            request = cast(LeaseRequest, codec.decode_body(LeaseRequest.TYPE, event.request))
            return self.lease(request, event.call)
        self.ledger.tasks.cause = type(event).__name__
        return self._applied(self._apply(event))

    def lease(self, request: LeaseRequest, call: CallId) -> Applied:
        """Apply an unencoded lease request, with the same effect as `apply(Leased(...))`."""
        self.ledger.tasks.cause = Leased.__name__
        return self._applied(leasing.lease(self.ledger, request, call))

    def _applied(self, reply: Reply | None) -> Applied:
        if reply is None:
            return Applied(None, [])
        self.ledger.admit()
        return Applied(reply, [*self.history.take_effects(), *self.ledger.take_effects()])

    def _apply(self, event: Durable) -> Reply | None:
        changed = True
        match event:
            case Leased():
                raise AssertionError("a lease is applied by `lease`")
            case Complete():
                return CompleteAck(refused=completion.complete(self.ledger, event))
            case NextBatch():
                return steps.form_batch(self.ledger, event)
            case GetRunInfo():
                return steps.take_over(self.ledger, event)
            case CommitStep():
                changed = steps.commit(self.ledger, event)
            case PublishWeights():
                steps.publish(self.ledger, event)
            case CheckpointSaved():
                steps.checkpoint(self.ledger, event)
            case FinishRun():
                self.history.finish(event.driver)
            case Register():
                recovery.register(self.ledger, event)
            case Configure():
                self.history.configure(event)
            case LeaseExpired():
                changed = recovery.expire(self.ledger, event.lease_id, not_started=event.not_started)
            case Cleared():
                self.ledger.cleared(event.store, event.count)
            case StoreGone():
                changed = recovery.remove_departed_store(self.ledger, event.store)
            case TailLost():
                recovery.lose_tail(self.ledger, event)
            case ShardsLost():
                changed = recovery.lose_shards(self.ledger, event)
            case SamplesTaken():
                changed = self.ledger.take_samples(event.tasks, lost=event.lost)
            case _:
                assert_never(event)
        return Ack() if changed else None

    # ---- views

    def story(self, task_id: str) -> list[Transition]:
        """Return those state changes of a task that this life of the process remembers, oldest first."""
        return self.ledger.tasks.story(task_id)

    def validate(self) -> None:
        """Check the invariants that hold after every event.

        Raises AssertionError. If a single task is at fault, the error names that task and its state changes.
        """
        history, ledger = self.history, self.ledger
        counts = dict.fromkeys(TaskState, 0) | {TaskState.COLLECTED: ledger.tasks.counts[TaskState.COLLECTED]}
        batched = {task.task_id: step for step, tasks in history.batches.items() for task in tasks}
        measured = {task_id for one in history.evaluations.open.values() for task_id in one.waiting}
        for task in ledger.tasks:
            counts[task.state] += 1
            waits = ledger.window.tasks.get(task.admission) is task or task.task_id in measured
            problem = self._problem(task, waits, batched.get(task.task_id, 0))
            if problem:
                text = f"{task.task_id}, fence {task.fence}, {task.state}: {problem}"
                raise AssertionError(f"{text}; {ledger.tasks.told(task.task_id)}")
        window, leases, records = ledger.window, ledger.leases, ledger.records
        checks = {
            "counts": ledger.tasks.counts == counts,
            "uncovered bytes": self.shards.uncovered == dict(self.shards.held_by(history.trained())),
            "the bound on live tasks": ledger.order.fixed or window.live <= self.plan.max_live,
            "the window": list(window.tasks) == sorted(window.tasks),
            "bytes kept for the recorder": records.held_bytes == sum(nbytes for _, nbytes in records.held),
            "versions of leases": leases.versions() == {lease.version for lease in leases if lease.version},
        }
        for stage in range(len(self.plan.stages)):
            waiting = [number for number, task in window.tasks.items() if ledger.is_waiting(stage, task)]
            checks[f"tasks that wait for stage {stage}"] = ledger.has_in_line(stage, waiting)
        wrong = [name for name, holds in checks.items() if not holds]
        if wrong:
            raise AssertionError(f"step {history.committed_step}: {', '.join(wrong)} ({ledger.tasks.cause})")

    def _problem(self, task: Task, waits: bool, batched: int) -> str:
        """Return a description of what is wrong with a task, or an empty string.

        `waits` is true if the window or an evaluation contains the task. `batched` is the step that consumed the task,
        or 0.
        """
        lease = self.ledger.leases.get(task.lease)
        due = self.ledger.records.find(task)
        ends = task.clears > 0 or (due is not None and due.nbytes > 0)
        match task.state:
            case TaskState.PENDING:
                right = not task.made and not task.lease and waits
            case TaskState.LEASED:
                right = not task.made and lease is not None
            case TaskState.ROLLED_OUT:
                right = waits and task.parts[0] is not None and not all(task.parts)
            case TaskState.READY:
                right = waits and all(task.parts) and task.admission in self.ledger.window.finished
            case TaskState.BATCHED:
                right = batched > self.history.committed_step
            case TaskState.TRAINED:
                right = 0 < batched <= self.history.committed_step or ends
            case TaskState.SCORED | TaskState.DROPPED:
                right = ends
            case TaskState.COLLECTED:
                right = False
            case _:
                assert_never(task.state)
        if not right:
            return "its fields contradict its state"
        if task.lease and (task.state not in _LEASABLE or lease is None or task.task_id not in lease.tasks):
            return f"lease {task.lease} does not hold it"
        if task.lost and task.state in _UNFINISHED:
            return "it is marked as lost, but an unfinished task with lost shards is sampled again"
        if task.clears and task.state not in _ACKNOWLEDGING:
            return f"{task.clears} stores have yet to acknowledge its last clear"
        return ""
