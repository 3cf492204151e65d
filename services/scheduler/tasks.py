"""The table of live tasks: one slot a task in typed columns, and one dict from task to slot.

A million tasks must fit, so a task is never an object. `array` rather than numpy: single cells are read three times
faster and come out as plain integers, which is what messages hold. A freed slot is used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from proto.ids import make_task_id

NO_SLOT: Final = -1
_INDEX_BITS = 40
_EPOCH_BITS = 32
EVALUATION: Final = -1
"""Admission number of a task that is outside admission."""


class TaskState:
    """Where a task stands, as stored; `NAMES[state]` is what people read. FREE: the slot holds no task.

    A task whose next stage (say, the reference's) is leased stays ROLLED_OUT: its lease is in the lease column.
    """

    FREE, PENDING, LEASED, ROLLED_OUT, READY, BATCHED, TRAINED, SCORED, DROPPED = range(9)
    NAMES: Final = ("FREE", "PENDING", "LEASED", "ROLLED_OUT", "READY", "BATCHED", "TRAINED", "SCORED", "DROPPED")


class Column:
    """Type codes of the columns, by name: the layout of a snapshot."""

    TASK: Final[dict[str, str]] = {
        "state": "B",
        "done": "B",  # bit i: the result of stage i is accepted
        "fence": "I",
        "admission": "q",
        "step": "i",  # the training step that consumed it; 0 before
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
    STAGE: Final[dict[str, str]] = {"store": "H", "hash": "Q"}


class TaskTable:
    """Columns by slot. Readers index the arrays; whoever changes `state` goes through `move`, which counts."""

    def __init__(self, stages: int, splits: Sequence[str]) -> None:
        """`stages`: number of leased stages (at most 8). `splits`: names that `split` cells index."""
        self.splits = list(splits)
        self._split_numbers = {name: number for number, name in enumerate(self.splits)}
        self._slot_of: dict[int, int] = {}
        """By `_number`: half the memory of the task id."""
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
        self.scalars: list[bytes | None] = []
        """Per-sample values of an accepted rollout, packed (see `scalars.py`), until the task is collected."""

    def __len__(self) -> int:
        return len(self._slot_of)

    def add(self, split: int, epoch: int, index: int, admission: int) -> int:
        """Put a new PENDING task with fence 1 into a slot; returns the slot."""
        if self.free:
            slot = self.free.pop()
        else:
            slot = len(self.state)
            for name in Column.TASK:
                getattr(self, name).append(0)
            for columns in (self.store, self.hash):
                for column in columns:
                    column.append(0)
            self.scalars.append(None)
        self._slot_of[_number(split, epoch, index)] = slot
        self.state[slot] = TaskState.PENDING
        self.counts[TaskState.PENDING] += 1
        self.fence[slot] = 1
        self.admission[slot] = admission
        self.split[slot] = split
        self.epoch[slot] = epoch
        self.index[slot] = index
        return slot

    def remove(self, slot: int) -> None:
        """Forget a task: its slot is free from here on."""
        del self._slot_of[_number(self.split[slot], self.epoch[slot], self.index[slot])]
        self.move(slot, TaskState.FREE)
        for name in Column.TASK:
            getattr(self, name)[slot] = 0
        self.scalars[slot] = None
        self.free.append(slot)

    def move(self, slot: int, state: int) -> None:
        """Change a task's state, and the counts with it."""
        self.counts[self.state[slot]] -= 1
        self.counts[state] += 1
        self.state[slot] = state

    def reset_attempt(self, slot: int) -> None:
        """Forget what the last attempt made and raise the fence: PENDING again, in its admission place."""
        self.fence[slot] += 1
        self.done[slot] = self.samples[slot] = self.failed[slot] = 0
        self.tokens[slot] = self.nbytes[slot] = self.lease[slot] = 0
        self.scalars[slot] = None
        self.move(slot, TaskState.PENDING)

    def find(self, task_id: str) -> int:
        """The slot of a task, or NO_SLOT."""
        try:
            split, epoch, index = task_id.rsplit("/", 2)
            number = _number(self._split_numbers[split], int(epoch), int(index))
        except (KeyError, ValueError):
            return NO_SLOT
        slot = self._slot_of.get(number, NO_SLOT)
        # one number may be written in several ways, and only one of them is the task's name
        return slot if slot != NO_SLOT and self.task_id(slot) == task_id else NO_SLOT

    def slot_of(self, split: int, epoch: int, index: int) -> int:
        """The slot of a task, or NO_SLOT."""
        return self._slot_of.get(_number(split, epoch, index), NO_SLOT)

    def task_id(self, slot: int) -> str:
        return make_task_id(self.splits[self.split[slot]], self.epoch[slot], self.index[slot])

    def dump(self) -> dict[str, Any]:
        """The table as plain data for a snapshot; `load` is the inverse."""
        return {
            "splits": self.splits,
            "free": array("q", self.free).tobytes(),
            "columns": {name: getattr(self, name).tobytes() for name in Column.TASK},
            "store": [column.tobytes() for column in self.store],
            "hash": [column.tobytes() for column in self.hash],
            "scalars": self.scalars,
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> TaskTable:
        table = cls(len(data["store"]), data["splits"])
        free = array("q")
        free.frombytes(data["free"])
        table.free = free.tolist()
        for name in Column.TASK:
            getattr(table, name).frombytes(data["columns"][name])
        for columns, dumped in ((table.store, data["store"]), (table.hash, data["hash"])):
            for column, cells in zip(columns, dumped, strict=True):
                column.frombytes(cells)
        table.scalars = list(data["scalars"])
        table.counts[TaskState.FREE] -= len(table.state)
        for slot, state in enumerate(table.state):
            table.counts[state] += 1
            if state != TaskState.FREE:
                table._slot_of[_number(table.split[slot], table.epoch[slot], table.index[slot])] = slot
        return table


def _number(split: int, epoch: int, index: int) -> int:
    """Another number for every task."""
    return index | epoch << _INDEX_BITS | split << _INDEX_BITS + _EPOCH_BITS
