"""The live tasks of a run, whose states change according to one table, and the window of those not yet batched. The
module is pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from proto.messages import TaskState
from proto.tensors import Array
from shared.stages import REWARD, REWARD_MODEL_PART

EVALUATION: Final = -1
"""Admission number of an evaluation task, which is outside admission."""
NAMED = "/"
"""Separator in the names of the parts of a dict reward and of the metrics of a workflow."""
_FLOATS = frozenset({"<f4", "<f8"})
Layout = tuple[tuple[str, str], ...]
"""`(name, dtype)` of each column of per-sample values (reward, length, ...), in packing order."""
REMEMBERED = 20_000
"""Number of transitions that `Tasks.log` keeps."""


_S = TaskState
TRANSITIONS: Final[dict[TaskState, frozenset[TaskState]]] = {
    _S.PENDING: frozenset({_S.LEASED, _S.DROPPED}),
    _S.LEASED: frozenset({_S.PENDING, _S.ROLLED_OUT, _S.SCORED, _S.DROPPED}),
    _S.ROLLED_OUT: frozenset({_S.PENDING, _S.READY, _S.SCORED, _S.DROPPED}),
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
    """Index into `Tasks.layouts` of the columns in `scalars`."""
    scalars: bytes = b""
    """Per-sample values of the rollout and later stages (`Tasks.scalars`), column after column."""
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


def layout_of(columns: dict[str, Array]) -> Layout:
    return tuple((name, values.dtype.str) for name, values in columns.items())


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
        self.layouts: list[Layout] = []
        """The different sets of columns of the tasks' values."""
        self._nothing: tuple[StagePart | None, ...] = (None,) * stages
        self._by_id: dict[str, Task] = {}

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

    # ---- values of samples

    def keep_scalars(self, task: Task, columns: dict[str, Array]) -> None:
        """Store the per-sample values of a task, each column of shape [samples]."""
        layout = layout_of(columns)
        if layout not in self.layouts:
            self.layouts.append(layout)
        task.layout = self.layouts.index(layout)
        task.scalars = b"".join(values.tobytes() for values in columns.values())

    def scalars(self, task: Task) -> dict[str, Array]:
        """Return the per-sample values of an accepted task, each of shape [samples]."""
        columns: dict[str, Array] = {}
        at = 0
        for name, dtype in self.layouts[task.layout]:
            columns[name] = np.frombuffer(task.scalars, dtype, task.samples, at)
            at += columns[name].nbytes
        return columns

    def later_rewards(self, task: Task) -> dict[str, list[float]]:
        """Return the rewards of an accepted task and their part that a stage after the rollout has made, by scalar, if
        there is one."""
        columns = self.scalars(task)
        names = (REWARD, REWARD_MODEL_PART) if REWARD_MODEL_PART in columns else ()
        return {name: columns[name].tolist() for name in names}

    def merged_scalars(self, tasks: Sequence[Task]) -> dict[str, Array]:
        """Return arrays over all samples of these tasks, in order.

        A column that any task lacks is left out, because it does not describe the whole batch. Float columns with a
        slash in their name (`NAMED`) are always kept, with NaN for missing values.
        """
        used = list(dict.fromkeys(self.layouts[task.layout] for task in tasks))
        names = [column for column in used[0] if all(column in layout for layout in used)] if tasks else []
        gappy = {column: None for layout in used for column in layout if NAMED in column[0] and column[1] in _FLOATS}
        parts = [(task.samples, self.scalars(task)) for task in tasks]
        merged: dict[str, Array] = {}
        for name, dtype in dict.fromkeys([*names, *sorted(gappy)]):
            missing = np.dtype(dtype)
            merged[name] = np.concatenate(
                [
                    columns[name]
                    if name in columns and columns[name].dtype == missing
                    else np.full(samples, np.nan, missing)
                    for samples, columns in parts
                ]
            )
        return merged


_BATCHED_OR_OVER = {TaskState.BATCHED, TaskState.TRAINED, TaskState.DROPPED}


class AdmissionWindow:
    """Admission numbers `[head, tail)`. A number without a task is a gap, left by a drop or by `consume:
    completion`."""

    def __init__(self) -> None:
        self.head = 0
        self.tail = 0
        self.tasks: dict[int, Task] = {}
        """The tasks by admission number, in ascending order."""
        self.finished: dict[int, None] = {}
        """Admission numbers of the READY tasks, in the order in which they became ready."""
        self._gaps: list[int] = []
        self._settled = 0

    @property
    def live(self) -> int:
        return len(self.tasks)

    def admit(self, tasks: Iterable[Task]) -> None:
        """Append tasks whose admission numbers continue from `tail`."""
        self.tasks.update((task.admission, task) for task in tasks)
        self.tail = next(reversed(self.tasks), self.tail - 1) + 1

    def rank(self, admission: int) -> int:
        """Return the number of tasks in the window before this number."""
        return admission - self.head - bisect_left(self._gaps, admission)

    def settled(self) -> int:
        """Return the first number whose task is not ready, or `tail`."""
        while self._settled < self.tail and (self._settled in self.finished or self._settled not in self.tasks):
            self._settled += 1
        return self._settled

    def mark_ready(self, admission: int) -> None:
        self.finished[admission] = None

    def mark_unready(self, admission: int) -> None:
        """Mark a task as not ready because it must be sampled again. The task need not have been ready."""
        self.finished.pop(admission, None)
        self._settled = min(self._settled, admission)

    def drop(self, admission: int) -> None:
        """Remove a task, which leaves a gap."""
        del self.tasks[admission]
        self.finished.pop(admission, None)
        insort(self._gaps, admission)

    def take(self, admissions: Iterable[int], head: int | None = None) -> list[Task]:
        """Remove tasks and return them. The head moves to `head`, or to the first remaining task."""
        taken = []
        for admission in list(admissions):
            taken.append(self.tasks[admission])
            self.drop(admission)
        self.head = next(iter(self.tasks), self.tail) if head is None else head
        self._settled = max(self._settled, self.head)
        del self._gaps[: bisect_left(self._gaps, self.head)]
        return taken

    def reopen(self, tasks: Sequence[Task]) -> None:
        """Insert tasks from steps that were rolled back.

        They go before the head, with the last task directly before it.
        """
        self.tasks = {task.admission: task for task in tasks} | self.tasks
        self.head -= len(tasks)
        self._settled = self.head

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Insert the READY tasks of a batch again, in their former places.

        They count as finished before all other tasks.
        """
        first = min(task.admission for task in tasks)
        finished = [*(task.admission for task in tasks), *self.finished]
        self.restore(min(first, self.head), self.tail, [*tasks, *self.tasks.values()], finished)

    def clear(self) -> list[Task]:
        """Remove and return all tasks. Admission numbers continue after the last one that was assigned."""
        tasks = list(self.tasks.values())
        self.restore(self.tail, self.tail, (), ())
        return tasks

    def restore(self, head: int, tail: int, tasks: Iterable[Task], finished: Iterable[int]) -> None:
        """Replace the whole content. Evaluation tasks, and tasks that have already been batched or have ended, are
        skipped."""
        open_ = [task for task in tasks if task.admission != EVALUATION and task.state not in _BATCHED_OR_OVER]
        self.tasks = {task.admission: task for task in sorted(open_, key=lambda task: task.admission)}
        self.head, self.tail, self._settled = head, tail, head
        self.finished = dict.fromkeys(finished)
        self._gaps = [number for number in range(head, tail) if number not in self.tasks]
