"""Collection of tasks: clears that stores have yet to acknowledge, one ordered queue per store. The module is pure.

A clear names `(task, fence)`: the store writes a tombstone and deletes every shard of the task up to that fence. No
clear is lost or reordered: each is kept until its store acknowledges it or is gone for good. A task is COLLECTED once
every store that may hold its shards has acknowledged the task's last clear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from proto.messages import PutTask, TaskState, WeightsRef
from services.scheduler.events import Tell
from services.scheduler.stores import away_stores, count_uncovered, stores_of
from services.scheduler.tasks import Task
from shared.stages import WEIGHTS

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

MAX_CLEARS = 1000
"""Maximum number of clears in one message."""

Entry = tuple[str, int, bool]
"""Task id, fence, and whether this is the last clear. The task is COLLECTED once all stores have acknowledged its last
clear."""


class ClearQueues:
    """Clears by store, oldest first."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Entry]] = {}
        self._changed: dict[str, None] = {}
        """Stores whose next clears may have changed since the last call of `take_changed`."""

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, store: str) -> bool:
        return store in self._queues

    @property
    def stores(self) -> list[str]:
        return list(self._queues)

    def add_store(self, store: str) -> None:
        self._queues.setdefault(store, deque())

    def remove_store(self, store: str) -> None:
        """Remove the queue of a store that is gone. First call `pop` to take the remaining clears."""
        del self._queues[store]
        self._changed.pop(store, None)

    def take_changed(self) -> list[str]:
        """Return the stores whose next clears may have changed since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def push(self, entry: Entry, stores: Iterable[str]) -> None:
        """Queue a clear for each of these stores. Unknown stores are skipped, because reconciliation clears what they
        hold."""
        for store in stores:
            if store in self._queues:
                self._queues[store].append(entry)
                self._changed[store] = None

    def head(self, store: str) -> list[PutTask]:
        """Return the clears to send next, at most MAX_CLEARS."""
        return [PutTask(task_id, fence) for task_id, fence, _ in islice(self._queues[store], MAX_CLEARS)]

    def pop(self, store: str, count: int) -> list[Entry]:
        queue = self._queues[store]
        self._changed[store] = None
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def pending(self) -> int:
        return sum(map(len, self._queues.values()))

    def pending_at(self, store: str) -> int:
        return len(self._queues[store])

    def entries(self) -> dict[str, list[Entry]]:
        """Return a copy of the queues, by store."""
        return {name: list(queue) for name, queue in self._queues.items()}

    def extend(self, store: str, entries: Iterable[Entry]) -> None:
        """Append entries from a snapshot to the queue of a store."""
        self.add_store(store)
        self._queues[store].extend(entries)
        self._changed[store] = None


def clear(run: RunState, task: Task, *, last: bool) -> int:
    """Clear the shards made under the task's fence, and return the number of acknowledgements to wait for.

    The clear goes to the stores that hold the task's results, to those of its lease's holder, and to those of the
    trainer's ranks. Shards elsewhere (a late put from an earlier attempt) are strays, which reconciliation finds.
    """
    if len(run.clears) > 1:
        may = dict.fromkeys([*run.trainer_stores, *(run.store_names[part.store] for part in task.made)])
        lease = run.leases.get(task.lease)
        if lease is not None:
            may |= dict.fromkeys(stores_of(run, lease.holder))
        stores = [store for store in may if store in run.clears]
    else:
        stores = run.clears.stores
    run.clears.push((task.task_id, task.fence, last), stores)
    return len(stores)


def clear_weights(run: RunState, ref: WeightsRef) -> None:
    """Clear a version's shards and its copies."""
    run.clears.push((ref.task_id, ref.fence, False), [ref.store, *away_stores(run)])


def release(run: RunState, task: Task) -> None:
    """Remove a task from the lease that holds it, if any."""
    lease = run.leases.get(task.lease)
    if lease is not None:
        del lease.tasks[task.task_id]
        run.tasks.edit(task).lease = 0


def collect(run: RunState, task: Task) -> None:
    """Clear a task from every store. The task must have ended. If its samples are to be recorded, the clear waits for
    the recorder."""
    due = run.records.find(task)
    if due is None or task.parts[0] is None:
        _collect(run, task)
        return
    run.records.hold(due, max(task.nbytes, 1))
    release(run, task)
    recording = run.config.recording
    room = recording.hold_tasks * run.plan.task_bytes if recording is not None else 0
    excess = run.records.held_bytes - room if run.plan.task_bytes else 0
    given_up: list[PutTask] = []
    for each, nbytes in run.records.held:
        if excess <= 0:
            break
        given_up.append(each)
        excess -= nbytes
    take_samples(run, given_up, lost=True)


def take_samples(run: RunState, tasks: Iterable[PutTask], *, lost: bool) -> bool:
    """Stop waiting for the recorder to take these tasks.

    The recorder has taken them or, if `lost` is true, is too slow or silent.

    Return False, and change nothing, if none of the tasks is due.
    """
    count = 0
    for each in tasks:
        due = run.records.due.get(each.task_id)
        if due is None or due.fence != each.fence:
            continue
        count += 1
        run.records.forget(each.task_id)
        task = run.tasks.find(each.task_id)
        if due.nbytes and task is not None:
            _collect(run, task)
    if lost and count:
        run.records.lost += count
        run.out.append(Tell("scheduler/samples_lost", {"tasks": float(count), "total/tasks": float(run.records.lost)}))
    return count > 0


def take_back_samples(run: RunState, step: int) -> None:
    """Forget the due tasks of steps and versions after `step`, and note that recorded samples must be discarded.

    In deterministic mode, the recorded samples are kept, because the repeated steps produce the same ones.
    """
    records = run.records
    later = [PutTask(task_id, due.fence) for task_id, due in records.due.items() if due.step > step]
    take_samples(run, later, lost=False)
    if run.config.recording is not None and not run.order.fixed:
        records.rewinds.append((run.lineage, step))


def _collect(run: RunState, task: Task) -> None:
    """Clear a task from every store that may hold it. The task is COLLECTED once all these stores have acknowledged."""
    waits = clear(run, task, last=True)
    release(run, task)
    if waits:
        run.tasks.edit(task).clears = waits
    else:
        run.tasks.move(task, TaskState.COLLECTED)


def cleared(run: RunState, store: str, count: int) -> None:
    """Remove the first `count` clears, which the store has acknowledged, from the store's queue."""
    for task_id, fence, last in run.clears.pop(store, count):
        task = run.tasks.find(task_id) if last else None
        if task is not None and task.fence == fence:  # with a higher fence, the task is live again
            run.tasks.edit(task).clears -= 1
            if not task.clears:
                run.tasks.move(task, TaskState.COLLECTED)


def set_aside(run: RunState, tasks: Iterable[Task]) -> None:
    """Drop these tasks without counting them as losses, and collect their shards."""
    for task in tasks:
        run.tasks.move(task, TaskState.DROPPED)
        collect(run, task)


def collect_steps(run: RunState, last: int) -> None:
    """Collect the trained tasks of all steps up to `last`."""
    for step in [step for step in run.batches if step <= min(last, run.committed_step)]:
        tasks = run.batches.pop(step)
        count_uncovered(run, tasks, -1)
        for task in tasks:
            collect(run, task)


def is_stray(run: RunState, entry: PutTask) -> bool:
    """Return whether the store's `entry` belongs to none of the accepted results, live leases and live versions."""
    split, epoch, index = entry.task_id.rsplit("/", 2)
    if split == WEIGHTS:
        version = (int(epoch), int(index))
        ref = run.versions.get(version)
        if ref is not None:
            return entry.fence < ref.fence
        newest = run.versions.newest
        # A version that has been put but not yet published has the driver's lineage and is not older than the newest
        # published one.
        return newest is not None and (version[0] < run.lineage or version < newest)
    task = run.tasks.find(entry.task_id)
    return task is None or entry.fence < task.fence
