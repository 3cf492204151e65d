"""Tasks that have ended, but whose samples the recorder has not taken yet. The module is pure.

A chosen task becomes due when it is trained, scored, filtered or dropped. The task's collection
(`TaskLedger.collect`) then waits until the recorder has taken the task. The scheduler stops waiting if the recorder is
away or too slow (`state.py`), or if the waiting tasks take up more room than is reserved for them. Training never waits
for the recorder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from proto.messages import DropReason, EndedTask, PutTask
from services.scheduler.history import RunHistory
from services.scheduler.tasks import Task, Tasks
from shared.samples.record import SampleState
from shared.stages import TRAIN

MOST_DUE = 65_536
"""Maximum number of due tasks. Trained tasks that are not collected yet take up only an entry and no extra room."""


class Due(msgspec.Struct):
    """A task that is due. `nbytes` is above 0 if the task's collection waits for the recorder."""

    fence: int
    state: SampleState
    step: int
    lineage: int
    reason: str = ""
    nbytes: int = 0


class Records:
    """The due tasks by id, oldest first, and the returns to earlier steps that affect recorded samples."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self.due: dict[str, Due] = {}
        self.rewinds: list[tuple[int, int]] = []
        """(lineage, step) of each return to an earlier step after which metrics rows were discarded."""
        self.lost = 0
        """Number of tasks whose samples will not be recorded."""
        self.held_bytes = 0
        """Bytes of the due tasks whose collection waits for the recorder."""

    def find(self, task: Task) -> Due | None:
        """Return the entry for the current attempt of a task."""
        due = self.due.get(task.task_id)
        return due if due is not None and due.fence == task.fence else None

    @property
    def held(self) -> Iterator[tuple[PutTask, int]]:
        """The due tasks whose collection waits for the recorder, with their bytes."""
        return ((PutTask(task_id, due.fence), due.nbytes) for task_id, due in self.due.items() if due.nbytes)

    def hold(self, due: Due, nbytes: int) -> None:
        """Record that the collection of a due task is waiting for the recorder."""
        self.held_bytes += nbytes - due.nbytes
        due.nbytes = nbytes

    def forget(self, task_id: str) -> None:
        """Remove a task that may be due, without counting it as lost."""
        due = self.due.pop(task_id, None)
        if due is not None:
            self.held_bytes -= due.nbytes

    def load(self, due: dict[str, Due], rewinds: list[tuple[int, int]], lost: int) -> None:
        """Replace the content with that of a snapshot."""
        self.due, self.rewinds, self.lost = due, rewinds, lost
        self.held_bytes = sum(entry.nbytes for entry in due.values())

    def trained(self, step: int, tasks: Iterable[Task]) -> None:
        """Mark the chosen tasks of a committed step as due."""
        recording = self._history.config.recording
        if recording is not None and recording.choice.takes_step(step):
            for task in tasks:
                self._add(task, Due(task.fence, SampleState.TRAINED, step, self._history.lineage))

    def scored(self, task: Task, lineage: int) -> None:
        """Mark a scored evaluation task as due. `lineage` is the lineage of the evaluated version."""
        self._add(task, Due(task.fence, SampleState.SCORED, task.epoch, lineage))

    def dropped(self, task: Task, why: DropReason, reason: str) -> None:
        """Mark a dropped task as due, if the task is chosen."""
        recording, history = self._history.config.recording, self._history
        step = history.committed_step + 1 if task.split == TRAIN else task.epoch
        if recording is not None and (task.split != TRAIN or recording.choice.takes_step(step)):
            state = SampleState.FILTERED if why == DropReason.FILTERED else SampleState.DROPPED
            self._add(task, Due(task.fence, state, step, history.lineage, f"{why}: {reason}"[:300]))

    def _add(self, task: Task, due: Due) -> None:
        recording = self._history.config.recording
        if recording is None or not recording.choice.takes(task.task_id):
            return
        if len(self.due) < MOST_DUE:
            self.due[task.task_id] = due
        else:
            self.lost += 1

    def next_due(self, tasks: Tasks, store_names: Sequence[str], most: int) -> list[EndedTask]:
        """Return up to `most` due tasks, oldest first. A task that left no shards has no samples."""
        ended: list[EndedTask] = []
        for task_id, due in islice(self.due.items(), most):
            task = tasks.find(task_id)
            part = task.parts[0] if task is not None and task.fence == due.fence else None
            samples = task.samples if task is not None and part is not None else 0
            store = store_names[part.store] if part is not None else ""
            ended.append(
                EndedTask(task_id, due.fence, str(due.state), due.step, due.lineage, samples, store, due.reason)
            )
        return ended
