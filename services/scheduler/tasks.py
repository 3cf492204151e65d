"""The table of live tasks: one slot per task in typed columns, and an index from task to slot.

Tasks are not objects, because a million of them must fit in memory. Columns are `array` rather than numpy arrays:
single cells are read three times faster, as the plain integers that messages hold. Freed slots are reused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from proto.ids import make_task_id
from services.scheduler.slot_index import NO_SLOT, SlotIndex

EVALUATION: Final = -1
"""Admission number of a task outside admission."""


class TaskState:
    """The states of a task, as stored. `NAMES[state]` is the name for display. FREE means that the slot holds no task.

    A task whose next stage (such as the reference) is leased stays ROLLED_OUT; its lease is in the lease column.
    """

    FREE, PENDING, LEASED, ROLLED_OUT, READY, BATCHED, TRAINED, SCORED, DROPPED = range(9)
    NAMES: Final = ("FREE", "PENDING", "LEASED", "ROLLED_OUT", "READY", "BATCHED", "TRAINED", "SCORED", "DROPPED")


class Column:
    """Type codes of the columns by name, which define the layout of a snapshot."""

    TASK: Final[dict[str, str]] = {
        "state": "B",
        "done": "B",  # bit i: the result of stage i is accepted
        "fence": "I",
        "admission": "q",
        "step": "i",  # the training step that consumed the task, or 0
        "split": "H",
        "epoch": "i",
        "index": "q",
        "lease": "Q",  # 0: not leased
        "failures": "H",
        "samples": "H",
        "failed": "H",
        "tokens": "I",
        "nbytes": "q",
        "clears": "B",  # stores that have not yet acknowledged the last clear
    }
    STAGE: Final[dict[str, str]] = {"store": "H", "hash": "Q", "part_bytes": "q"}


class TaskTable:
    """Columns indexed by slot. Readers index the arrays directly; `state` is changed by `move`, which counts tasks."""

    def __init__(self, stages: int, splits: Sequence[str]) -> None:
        """`stages` is the number of leased stages, at most 8. `splits` are the names that `split` cells index."""
        self.splits = list(splits)
        self._split_numbers = {name: number for number, name in enumerate(self.splits)}
        self._slots = SlotIndex()
        self.free: list[int] = []
        self.counts = [0] * len(TaskState.NAMES)
        self.state = array("B")
        self.done = array("B")
        self.fence = array("I")
        self.admission = array("q")
        self.step = array("i")
        self.split = array("H")
        self.epoch = array("i")
        self.index = array("q")
        self.lease = array("Q")
        self.failures = array("H")
        self.samples = array("H")
        self.failed = array("H")
        self.tokens = array("I")
        self.nbytes = array("q")
        self.clears = array("B")
        self.store = [array("H") for _ in range(stages)]
        self.hash = [array("Q") for _ in range(stages)]
        self.part_bytes = [array("q") for _ in range(stages)]
        self.scalars: list[bytes | None] = []
        """Packed per-sample values of accepted rollouts (see `scalars.py`), until the task is collected."""

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, split: int, epoch: int, indices: Sequence[int], admission: int) -> list[int]:
        """Put new PENDING tasks with fence 1 into slots and return the slots.

        Admission numbers count up from `admission`, or are all `EVALUATION`.
        """
        count = len(indices)
        numbers = range(admission, admission + count) if admission != EVALUATION else [EVALUATION] * count
        slots = [self.free.pop() for _ in range(min(len(self.free), count))]
        new = count - len(slots)
        slots.extend(range(len(self.state), len(self.state) + new))
        for column in self.columns():
            column.frombytes(bytes(column.itemsize * new))
        self.scalars.extend([None] * new)
        self._slots.add(split, epoch, indices, slots)
        for slot, index, number in zip(slots, indices, numbers, strict=True):
            self.state[slot] = TaskState.PENDING
            self.fence[slot] = 1
            self.admission[slot] = number
            self.split[slot] = split
            self.epoch[slot] = epoch
            self.index[slot] = index
        self.counts[TaskState.PENDING] += count
        return slots

    def remove(self, slot: int) -> None:
        """Remove a task and free its slot."""
        self._slots.remove(self.split[slot], self.epoch[slot], self.index[slot])
        self.move(slot, TaskState.FREE)
        for name in Column.TASK:
            getattr(self, name)[slot] = 0
        self.scalars[slot] = None
        self.free.append(slot)

    def move(self, slot: int, state: int) -> None:
        """Change the state of a task and update the counts."""
        self.counts[self.state[slot]] -= 1
        self.counts[state] += 1
        self.state[slot] = state

    def reset_attempt(self, slot: int) -> None:
        """Discard the results of the last attempt and raise the fence. The task is PENDING and keeps its place."""
        self.fence[slot] += 1
        self.done[slot] = self.samples[slot] = self.failed[slot] = 0
        self.tokens[slot] = self.nbytes[slot] = self.lease[slot] = 0
        self.scalars[slot] = None
        self.move(slot, TaskState.PENDING)

    def find(self, task_id: str) -> int:
        """Return the slot of a task by its id, or NO_SLOT."""
        try:
            split, epoch, index = task_id.rsplit("/", 2)
            slot = self._slots.get(self._split_numbers[split], int(epoch), int(index))
        except (KeyError, ValueError):
            return NO_SLOT
        # A number can be written in several ways, of which only one is part of a task id.
        return slot if slot != NO_SLOT and self.task_id(slot) == task_id else NO_SLOT

    def slot_of(self, split: int, epoch: int, index: int) -> int:
        """Return the slot of a task by its numbers, or NO_SLOT."""
        return self._slots.get(split, epoch, index)

    def task_id(self, slot: int) -> str:
        return make_task_id(self.splits[self.split[slot]], self.epoch[slot], self.index[slot])

    def columns(self) -> list[array[Any]]:
        """Return all columns in the order of a snapshot."""
        return [*(getattr(self, name) for name in Column.TASK), *self.store, *self.hash, *self.part_bytes]

    def index_slots(self) -> None:
        """Rebuild the index and the counts after the columns were loaded.

        Raises ValueError if the columns differ in length.
        """
        if {len(column) for column in self.columns()} - {len(self.scalars)}:
            raise ValueError(f"columns of different lengths, {len(self.scalars)} tasks")
        self.counts = [self.state.count(state) for state in range(len(TaskState.NAMES))]
        self.counts[TaskState.FREE] = 0
        found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for slot, state in enumerate(self.state):
            if state != TaskState.FREE:
                rows, slots = found.setdefault((self.split[slot], self.epoch[slot]), ([], []))
                rows.append(self.index[slot])
                slots.append(slot)
        for (split, epoch), (rows, slots) in found.items():
            self._slots.add(split, epoch, rows, slots)
