"""The training tasks that have been admitted but not yet batched, by admission number. The module is pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from proto.messages import TaskState
from services.scheduler.tasks import EVALUATION, Task

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
