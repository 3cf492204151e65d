"""Tasks that have ended: losses by reason, and tasks whose samples the recorder has not taken. The module is pure.

Drops, and samples without a reward, are counted by admission number until the batch to which the task belongs is
formed, so the counts of a step do not depend on when results arrived.

A chosen task becomes due when it is trained, scored, filtered or dropped. The task's collection
(`TaskLedger.collect`) then waits until the recorder has taken the task. The scheduler stops waiting if the recorder is
away or too slow (`HandOver`), or if the waiting tasks take up more room than is reserved for them. Training never waits
for the recorder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from proto.messages import DropReason, EndedTask, LossReason, PutTask, SamplesDue, TakenBack, TakeSamples, TaskResult
from services.scheduler.history import RunHistory
from services.scheduler.shards import StoredShards
from services.scheduler.tasks import Task, Tasks
from shared.samples.record import SampleState
from shared.stages import TRAIN

HOLD_S = 5.0
"""Maximum seconds that the collection of a task waits for the recorder after the task has ended. If the recorder has
been silent for longer than this, the collection does not wait at all."""
RECORD_S = 3.0
"""Minimum seconds between two answers to the recorder if no collection waits for the recorder."""
RECORDED_AT_ONCE = 256
"""Maximum number of tasks that the recorder takes at once."""
_DROPS = frozenset(DropReason)
_LOSSES = frozenset(LossReason)
MOST_DUE = 65_536
"""Maximum number of due tasks. Trained tasks that are not collected yet take up only an entry and no extra room."""


def drop_reason(why: str) -> DropReason:
    """Return the reason that a peer gave, or OTHER if the reason is empty or comes from a later release."""
    return DropReason(why) if why in _DROPS else DropReason.OTHER


@dataclass
class Filtered:
    """Counts of tasks and samples dropped because all rewards of a task were equal, and the sum of those rewards."""

    tasks: int = 0
    samples: int = 0
    reward_sum: float = 0.0

    def __add__(self, other: Filtered) -> Filtered:
        return Filtered(self.tasks + other.tasks, self.samples + other.samples, self.reward_sum + other.reward_sum)


@dataclass
class Losses:
    """Total counts (`dropped`, `lost`) and the counts of the newest batch (`batch_drops`, `batch_lost`)."""

    dropped: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    counted_drops: dict[int, str] = field(default_factory=dict)
    """Reason of each drop that the newest batch has counted, by admission number."""
    counted_lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost samples that the newest batch has counted, by admission number."""
    open_drops: dict[int, str] = field(default_factory=dict)
    """Reason of each drop that no batch has counted, by admission number."""
    open_lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost samples that no batch has counted, by admission number."""
    filtered: Filtered = field(default_factory=Filtered)
    """Tasks that were filtered since the newest batch."""
    batch_filtered: Filtered = field(default_factory=Filtered)

    def drop(self, admission: int, reason: DropReason) -> None:
        """Count a dropped task."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.open_drops[admission] = reason

    def lose(self, admission: int, result: TaskResult) -> None:
        """Count the lost samples, if any, of an accepted result."""
        counts: Counter[str] = Counter()
        for reason, count in result.lost.items():
            counts[reason if reason in _LOSSES else LossReason.OTHER] += count
        unknown = result.samples_failed - counts.total()
        if unknown > 0:
            counts[LossReason.OTHER] += unknown
        if counts:
            self.lost = dict(Counter(self.lost) + counts)
            self.open_lost[admission] = dict(counts)

    def batched(self, taken: Iterable[int], is_over: Callable[[int], bool]) -> None:
        """Count the losses of a batch: the losses of the tasks `taken`, and the drops for which `is_over` is true.

        `is_over` returns whether a drop belongs to this batch or an earlier one.
        """
        over = [admission for admission in self.open_drops if is_over(admission)]
        self.counted_drops = {admission: self.open_drops.pop(admission) for admission in over}
        self.counted_lost = {
            admission: self.open_lost.pop(admission) for admission in (*taken, *over) if admission in self.open_lost
        }
        self.batch_filtered, self.filtered = self.filtered, Filtered()

    def put_back(self) -> None:
        """Undo `batched`: the next batch counts again everything that the newest batch has counted."""
        self.open_drops |= self.counted_drops
        self.open_lost |= self.counted_lost
        self.filtered += self.batch_filtered
        self.counted_drops, self.counted_lost, self.batch_filtered = {}, {}, Filtered()

    @property
    def batch_drops(self) -> dict[str, int]:
        """Number of drops that the newest batch has counted, by reason."""
        return dict(sorted(Counter(self.counted_drops.values()).items()))

    @property
    def batch_lost(self) -> dict[str, int]:
        """Number of lost samples that the newest batch has counted, by reason."""
        lost: Counter[str] = Counter()
        for counts in self.counted_lost.values():
            lost.update(counts)
        return dict(sorted(lost.items()))


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


class HandOver:
    """When the samples of ended tasks are handed to the recorder, and for how long their collection waits for it. It
    dies with this process."""

    def __init__(self) -> None:
        self.asked_at = 0.0
        """Time of the last request from the recorder, or the start of this life if there has been none yet."""
        self._answered_at = 0.0
        self._held_since: dict[tuple[str, int], float] = {}
        """Times at which the collection of each task began to wait for the recorder, by (task id, fence)."""

    def begin(self, now: float) -> None:
        self.asked_at, self._answered_at = now, now - RECORD_S

    def samples(
        self, records: Records, tasks: Tasks, shards: StoredShards, request: TakeSamples, now: float
    ) -> SamplesDue | None:
        """Return the answer to the recorder, or None if it can wait. The oldest due tasks come first; a task that left
        no shards has no samples."""
        rewinds = [TakenBack(*rewind) for rewind in records.rewinds[max(request.rewinds, 0) :]]
        early = not records.held_bytes and now - self._answered_at < RECORD_S
        if not request.final and not rewinds and (not records.due or early):
            return None
        self._answered_at = now
        ended: list[EndedTask] = []
        for task_id, due in islice(records.due.items(), RECORDED_AT_ONCE):
            task = tasks.find(task_id)
            part = task.parts[0] if task is not None and task.fence == due.fence else None
            samples = task.samples if task is not None and part is not None else 0
            store = shards.store_names[part.store] if part is not None else ""
            later = tasks.later_rewards(task) if task is not None and samples else {}
            ended.append(
                EndedTask(task_id, due.fence, str(due.state), due.step, due.lineage, samples, store, due.reason, later)
            )
        stores = list(shards.trainer_stores)
        return SamplesDue(tasks=ended, trainer_stores=stores, rewinds=rewinds, lost=records.lost)

    def late(self, records: Records, now: float) -> list[PutTask]:
        """Return the tasks whose collection no longer waits, because the recorder is silent or too slow."""
        held = {(ended.task_id, ended.fence): ended for ended, _ in records.held}
        self._held_since = {key: self._held_since.get(key, now) for key in held}
        silent = now - self.asked_at > HOLD_S
        return [ended for key, ended in held.items() if silent or now - self._held_since[key] > HOLD_S]
