"""The live tasks of a run, whose states change according to one table. The module is pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from proto.messages import TaskState

EVALUATION: Final = -1
"""Admission number of an evaluation task, which is outside admission."""
REMEMBERED = 20_000
"""Number of transitions that `Tasks.log` keeps."""


_S = TaskState
TRANSITIONS: Final[dict[TaskState, frozenset[TaskState]]] = {
    _S.PENDING: frozenset({_S.LEASED, _S.DROPPED}),
    _S.LEASED: frozenset({_S.PENDING, _S.ROLLED_OUT, _S.SCORED, _S.DROPPED}),
    _S.ROLLED_OUT: frozenset({_S.PENDING, _S.READY, _S.DROPPED}),
    _S.READY: frozenset({_S.PENDING, _S.BATCHED, _S.DROPPED}),
    _S.BATCHED: frozenset({_S.PENDING, _S.READY, _S.TRAINED, _S.DROPPED}),
    _S.TRAINED: frozenset({_S.PENDING, _S.DROPPED, _S.COLLECTED}),
    _S.SCORED: frozenset({_S.PENDING, _S.COLLECTED}),
    _S.DROPPED: frozenset({_S.PENDING, _S.COLLECTED}),
    _S.COLLECTED: frozenset(),
}
"""The states that may follow each state.

BATCHED and TRAINED tasks become DROPPED or PENDING only when the run returns to an earlier step. BATCHED tasks become
READY only when a task of their step has lost its shards. Tasks that wait for their last clears become PENDING only when
they are sampled again. A task never becomes COLLECTED before it has ended, so shards of a task that may still be leased
or trained are not freed (docs/architecture.md, promise 3).
"""


class StagePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An accepted result of one stage, with the location of its shards. `store` indexes
    `StoredShards.store_names`."""

    store: int
    content_hash: int
    nbytes: int


class Task(msgspec.Struct, array_like=True, eq=False):
    """A live task. A snapshot stores the fields in this order. The state is changed through `Tasks.move`."""

    task_id: str
    admission: int
    """Number in the order of admission, or `EVALUATION`."""
    parts: tuple[StagePart | None, ...]
    """The accepted result of each stage."""
    state: TaskState = TaskState.PENDING
    fence: int = 1
    lease: int = 0
    """Id of the lease that holds the task, or 0."""
    failures: int = 0
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    clears: int = 0
    """Number of stores that have not yet acknowledged the last clear."""
    layout: int = 0
    """Index into `TaskLedger.layouts` of the columns in `scalars`."""
    scalars: bytes = b""
    """Per-sample values of the rollout and later stages (see `scalars.py`)."""
    lost: bool = False
    """Whether a store has lost shards of a task that is BATCHED or TRAINED, in which case its step cannot be read
    again."""

    @property
    def split(self) -> str:
        return self.task_id.partition("/")[0]

    @property
    def epoch(self) -> int:
        """The epoch, or for an evaluation task the step of the version."""
        return int(self.task_id.rsplit("/", 2)[1])

    @property
    def row(self) -> int:
        """Index of the row in its data set."""
        return int(self.task_id.rpartition("/")[2])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)

    @property
    def made(self) -> list[StagePart]:
        """The accepted results."""
        return [part for part in self.parts if part is not None]


class Transition(NamedTuple):
    """One change of state, and the kind of event that caused it."""

    task_id: str
    fence: int
    before: TaskState | None
    after: TaskState
    cause: str


class Tasks:
    """All live tasks, by id."""

    def __init__(self, stages: int) -> None:
        self.counts = dict.fromkeys(TaskState, 0)
        """Number of tasks by state. COLLECTED counts all tasks that have ever been collected."""
        self.log: deque[Transition] = deque(maxlen=REMEMBERED)
        self.cause = ""
        """Kind of the event that is being applied."""
        self.least_fence = 1
        """Minimum fence of a new attempt."""
        self._nothing: tuple[StagePart | None, ...] = (None,) * stages
        self._by_id: dict[str, Task] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_id.values())

    def __getitem__(self, task_id: str) -> Task:
        """Return a task that must be live. Raises KeyError."""
        return self._by_id[task_id]

    def find(self, task_id: str) -> Task | None:
        return self._by_id.get(task_id)

    def add(self, task_id: str, admission: int, fence: int = 1) -> Task:
        """Add a PENDING task whose fence is at least `fence`."""
        fence = max(fence, self.least_fence)
        task = self._by_id[task_id] = Task(task_id, admission, self._nothing, fence=fence)
        self.counts[TaskState.PENDING] += 1
        self.log.append(Transition(task_id, fence, None, TaskState.PENDING, self.cause))
        return task

    def move(self, task: Task, state: TaskState) -> None:
        """Change the state of a task. A COLLECTED task is removed. Raises ValueError if `TRANSITIONS` forbids it."""
        before = task.state
        if state not in TRANSITIONS[before]:
            problem = f"{before} -> {state} is not a transition ({self.cause})"
            raise ValueError(f"{task.task_id}, fence {task.fence}: {problem}; {self.told(task.task_id)}")
        task.state = state
        self.counts[before] -= 1
        self.counts[state] += 1
        self.log.append(Transition(task.task_id, task.fence, before, state, self.cause))
        if state == TaskState.COLLECTED:
            del self._by_id[task.task_id]

    def story(self, task_id: str) -> list[Transition]:
        """Return those state changes of a task that `log` still contains, oldest first."""
        return [transition for transition in self.log if transition.task_id == task_id]

    def told(self, task_id: str) -> str:
        """Return the state changes of a task in one line."""
        return "; ".join(f"{change.before} -> {change.after} ({change.cause})" for change in self.story(task_id))

    def begin_attempt(self, task: Task) -> None:
        """Discard the results of the last attempt: the task is PENDING under a higher fence."""
        self.move(task, TaskState.PENDING)
        task.fence = max(task.fence + 1, self.least_fence)
        task.parts = self._nothing
        task.samples = task.failed = task.tokens = task.clears = task.layout = 0
        task.scalars = b""
        task.lost = False

    def load(self, task: Task) -> None:
        """Add a task from a snapshot."""
        self._by_id[task.task_id] = task
        self.counts[task.state] += 1
