"""The durable state of a run: everything that the journal rebuilds. It has no clock, no I/O and no open calls.

`RunState` holds the data; the rules for each subject are functions in a module named after it (`leasing`, `completion`,
`steps`, ...). An event that is refused raises RpcError before it changes anything. Applying the same events in the same
order produces the same state, bit for bit. Heartbeats, time and waiting calls are therefore handled in `state.py`.
"""

from __future__ import annotations

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
from proto.tensors import Array
from services.scheduler import leasing, scalars
from services.scheduler.admission import admit
from services.scheduler.attempts import DEATH, FAILURE
from services.scheduler.collection import ClearQueues, cleared, take_samples
from services.scheduler.completion import complete
from services.scheduler.consumption import IN_ORDER
from services.scheduler.deterministic import DETERMINISTIC
from services.scheduler.evaluations import Evaluations, write_rows
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
from services.scheduler.leases import CallId, Leases
from services.scheduler.losses import Losses
from services.scheduler.plan import EpochOrder, Plan
from services.scheduler.records import Records
from services.scheduler.registry import Registry
from services.scheduler.shard_loss import lose_shards
from services.scheduler.staleness import BY_COMPLETION
from services.scheduler.steps import check_driver, checkpoint, commit, form_batch, take_over
from services.scheduler.store_loss import come_back_empty, lose_tail, lost_data, remove_departed_store
from services.scheduler.stores import RANK, STORE, held_in, limits, note_trainer_stores
from services.scheduler.tasks import Task, Tasks, Transition
from services.scheduler.versions import Versions, publish
from services.scheduler.window import AdmissionWindow
from shared.rundir import service_name
from shared.topology import TRAINER_STORE

Reply = LeaseGrant | CompleteAck | StepBatch | RunInfo | Ack
_LEASABLE = frozenset({TaskState.LEASED, TaskState.ROLLED_OUT})
_UNFINISHED = frozenset({TaskState.PENDING, TaskState.LEASED, TaskState.ROLLED_OUT, TaskState.READY})
_ACKNOWLEDGING = frozenset({TaskState.TRAINED, TaskState.SCORED, TaskState.DROPPED})


class RunState:
    """The tasks, leases, versions, evaluations and steps of one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Plan = plan
        self.order = DETERMINISTIC if plan.deterministic else BY_COMPLETION if plan.by_completion else IN_ORDER
        """The order in which steps consume tasks."""
        self.epochs = EpochOrder(plan)
        makers = {key: i for i, stage in enumerate(plan.stages) for key in stage.makes}
        self.needs = [tuple(sorted({makers[key] for key in stage.needs})) for stage in plan.stages]
        """For each stage, the stages that produce the keys it needs."""
        self.out: list[Effect] = []
        """Effects of the applied events. The caller removes them."""
        self.config = Configure(steps=0, attempts=3, keep_last=2, collect_at_commit=False)
        self.registry = Registry()

        self.tasks = Tasks(len(plan.stages))
        self.window: AdmissionWindow = AdmissionWindow()
        self.waiting: list[list[int]] = [[] for _ in plan.stages]
        """For each stage, a heap of the admission numbers of the tasks that wait for it. Outdated entries are
        skipped."""
        self.leases = Leases()
        self.clears = ClearQueues()
        self.versions = Versions()
        self.evaluations = Evaluations()
        self.losses = Losses()
        self.records = Records()
        self.store_names: list[str] = []
        self.layouts: list[scalars.Layout] = []

        self.batches: dict[int, list[Task]] = {}
        """Tasks of each journaled step, in batch order, kept until they are collected."""
        self.identities: dict[int, list[str]] = {}
        """Task ids of each step, kept until the oldest checkpoint to which recovery may fall back covers the step."""
        self.reopened: list[str] = []
        """Tasks of steps that were rolled back, and tasks that were waiting at that time. They are admitted before all
        others."""
        self.position = 0
        """Number of tasks that were admitted from the epoch order."""
        self.highest_fence = 1
        """The highest fence of any task so far. A collected task that is sampled again gets a higher fence."""

        self.driver = 0
        self.old_drivers: list[int] = []
        self.lineage = 0
        self.batched_step: int = 0
        self.committed_step = 0
        self.checkpoint_step = -1
        self.finished = False
        self.broken = ""
        """In deterministic mode, the reason why the run cannot continue bit-identically, or an empty string."""
        self.uncovered: dict[str, int] = {}
        """Bytes of trained tasks that wait for a checkpoint, by store."""
        self.trainer_stores: tuple[str, ...] = (TRAINER_STORE,)
        """The stores into which trainer ranks put log-probs (`stores.trainer_stores`)."""
        self.gone: dict[str, str] = {}
        """The `data_id` of each joined store that is gone for good."""
        self.lost_version = ""
        """Task id of a version that its store has lost, or an empty string. It is reset when the driver resumes."""
        self.eval_lease_debt = 0
        """Number of leases by which evaluations are ahead of training. It is at most the number of leases in a step."""
        self.waiting_rows: dict[int, dict[str, float]] = {}
        """Metrics rows by step that wait for an evaluation."""
        self.next_row = 0 if plan.evals else 1

        self.dropped_in_a_row = 0
        """Number of training tasks dropped in this life since the last task with enough samples. No event depends on
        this number."""
        self.last_drop = ""
        """The last dropped task and the reason why it was dropped."""
        self.checked = 0
        """With `consume: completion`, the number of staleness checks of finished tasks since the last commit."""
        self.stale = 0
        """Number of those checks after which the task was dropped."""

    # ---- events

    def apply(self, event: Durable) -> Reply | None:
        """Apply one durable event, live or replayed, and return the reply to its sender.

        None means that nothing changed, so the event is not journaled. Raises RpcError, and changes nothing, if the
        event is refused.
        """
        self.tasks.cause = type(event).__name__
        reply = self._apply(event)
        if reply is not None:
            admit(self)
        return reply

    def lease(self, request: LeaseRequest, call: CallId) -> LeaseGrant | None:
        """Apply an unencoded lease request, with the same effect as `apply(Leased(...))`."""
        self.tasks.cause = Leased.__name__
        grant = leasing.lease(self, request, call)
        if grant is not None:
            admit(self)
        return grant

    def _apply(self, event: Durable) -> Reply | None:
        changed = True
        match event:
            case Leased():
                request = cast(LeaseRequest, codec.decode_body(LeaseRequest.TYPE, event.request))
                return leasing.lease(self, request, event.call)
            case Complete():
                return CompleteAck(refused=complete(self, event))
            case NextBatch():
                return form_batch(self, event)
            case GetRunInfo():
                return take_over(self, event)
            case CommitStep():
                changed = commit(self, event)
            case PublishWeights():
                check_driver(self, event.driver)
                publish(self, event)
            case CheckpointSaved():
                checkpoint(self, event)
            case FinishRun():
                check_driver(self, event.driver)
                self.finished = True
            case Register():
                self._register(event)
            case Configure():
                self._configure(event)
            case LeaseExpired():
                changed = self._expire(event)
            case Cleared():
                cleared(self, event.store, event.count)
            case StoreGone():
                changed = remove_departed_store(self, event.store)
            case TailLost():
                lose_tail(self, event)
            case ShardsLost():
                changed = lose_shards(self, event)
            case SamplesTaken():
                changed = take_samples(self, event.tasks, lost=event.lost)
            case _:
                assert_never(event)
        return Ack() if changed else None

    def _configure(self, event: Configure) -> None:
        self.config = event
        self.broken = ""  # a resumed run may have been given more attempts
        self.finished = self.finished and self.committed_step >= event.steps
        write_rows(self)

    def _register(self, request: Register) -> None:
        """Register a new life of an instance, and end the leases of its previous life at once."""
        holder = (request.service, request.instance)
        old = self.registry.get(holder)
        for lease in self.leases.held_by(holder):
            if lease.incarnation != request.incarnation:
                leasing.give_up(self, lease, DEATH)
        self.registry.put(request)
        if request.service == STORE:
            if lost_data(self, old, request):
                come_back_empty(self, service_name(*holder))
            self.clears.add_store(service_name(*holder))
        if request.service in (STORE, RANK):
            note_trainer_stores(self)

    def _expire(self, event: LeaseExpired) -> bool:
        """End a lease that made no progress and retry its tasks.

        This counts as a failed attempt if work on the tasks had begun.
        """
        lease = self.leases.get(event.lease_id)
        if lease is not None:
            leasing.give_up(self, lease, 0 if event.not_started else FAILURE)
        return lease is not None

    # ---- views

    @property
    def open_batch(self) -> list[Task]:
        """The tasks of the step that has been batched but not committed, if any."""
        return self.batches.get(self.batched_step, []) if self.batched_step > self.committed_step else []

    @property
    def limit_bytes(self) -> int:
        """Sum of the limits of all stores, for display only: no single put can use all of it."""
        return sum(limits(self).values())

    @property
    def uncovered_bytes(self) -> int:
        """Bytes of trained tasks that are waiting for a checkpoint, across all stores."""
        return sum(self.uncovered.values())

    def columns(self, task: Task) -> dict[str, Array]:
        """Return the per-sample values of an accepted task, each of shape [samples]."""
        return scalars.unpack(self.layouts[task.layout], task.samples, task.scalars)

    def line_up(self) -> None:
        """Rebuild the waiting lines from the window. A sorted list is a heap."""
        tasks = self.window.tasks.items()
        for stage in range(len(self.waiting)):
            self.waiting[stage] = [number for number, task in tasks if leasing.waits(self, stage, task)]

    def story(self, task_id: str) -> list[Transition]:
        """Return those state changes of a task that this life of the process remembers, oldest first."""
        return self.tasks.story(task_id)

    def validate(self) -> None:
        """Check the invariants that hold after every event.

        Raises AssertionError. If a single task is at fault, the error names that task and its state changes.
        """
        counts = dict.fromkeys(TaskState, 0) | {TaskState.COLLECTED: self.tasks.counts[TaskState.COLLECTED]}
        batched = {task.task_id: step for step, tasks in self.batches.items() for task in tasks}
        measured = {task_id for one in self.evaluations.open.values() for task_id in one.waiting}
        for task in self.tasks:
            counts[task.state] += 1
            waits = self.window.tasks.get(task.admission) is task or task.task_id in measured
            problem = self._problem(task, waits, batched.get(task.task_id, 0))
            if problem:
                text = f"{task.task_id}, fence {task.fence}, {task.state}: {problem}"
                raise AssertionError(f"{text}; {self.tasks.told(task.task_id)}")
        trained = [task for step, tasks in self.batches.items() if step <= self.committed_step for task in tasks]
        checks = {
            "counts": self.tasks.counts == counts,
            "uncovered bytes": self.uncovered == dict(held_in(self, trained)),
            "the bound on live tasks": self.order.fixed or self.window.live <= self.plan.max_live,
            "the window": list(self.window.tasks) == sorted(self.window.tasks),
            "bytes kept for the recorder": self.records.held_bytes == sum(each for _, each in self.records.held),
            "versions of leases": self.leases.versions() == {each.version for each in self.leases if each.version},
        }
        for stage, line in enumerate(self.waiting):
            waiting = {number for number, task in self.window.tasks.items() if leasing.waits(self, stage, task)}
            checks[f"tasks that wait for stage {stage}"] = waiting <= set(line)
        wrong = [name for name, holds in checks.items() if not holds]
        if wrong:
            raise AssertionError(f"step {self.committed_step}: {', '.join(wrong)} ({self.tasks.cause})")

    def _problem(self, task: Task, waits: bool, batched: int) -> str:
        """Return a description of what is wrong with a task, or an empty string.

        `waits` is true if the window or an evaluation contains the task. `batched` is the step that consumed the task,
        or 0.
        """
        lease = self.leases.get(task.lease)
        due = self.records.find(task)
        ends = task.clears > 0 or (due is not None and due.nbytes > 0)
        match task.state:
            case TaskState.PENDING:
                right = not task.made and not task.lease and waits
            case TaskState.LEASED:
                right = not task.made and lease is not None
            case TaskState.ROLLED_OUT:
                right = waits and task.parts[0] is not None and not all(task.parts)
            case TaskState.READY:
                right = waits and all(task.parts) and task.admission in self.window.finished
            case TaskState.BATCHED:
                right = batched > self.committed_step
            case TaskState.TRAINED:
                right = 0 < batched <= self.committed_step or ends
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
