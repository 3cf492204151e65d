"""What property tests look at inside the scheduler's durable state, and the checks that hold after every event."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from proto.ids import make_task_id
from proto.messages import LeaseRequest
from services.scheduler.core import Core


@dataclass(frozen=True)
class TaskView:
    """A live task. `done` tells whether any result of it is accepted, `clears` how many stores have yet to answer."""

    task_id: str
    fence: int
    clears: int
    done: bool


def find(core: Core, task_id: str) -> TaskView | None:
    slot = core.tasks.find(task_id)
    if slot < 0:
        return None
    return TaskView(task_id, core.tasks.fence[slot], core.tasks.clears[slot], bool(core.tasks.done[slot]))


def live_ids(core: Core) -> list[str]:
    """Training tasks that are not batched yet, in admission order."""
    return [core.tasks.task_id(slot) for _, slot in core.window.members()]


def batch_ids(core: Core, step: int) -> list[str]:
    return [core.tasks.task_id(slot) for slot in core.batches.get(step, ())]


def taken_back_ids(core: Core) -> list[str]:
    """Tasks of steps that were taken back, which are admitted before all others."""
    return [make_task_id("train", *name) for name in zip(core.reopened[::2], core.reopened[1::2], strict=True)]


def leased(core: Core) -> list[TaskView]:
    """Tasks that live leases hold."""
    table = core.tasks
    slots = [slot for lease in core.leases for slot in lease.slots if table.lease[slot] == lease.lease_id]
    return [view for slot in slots if (view := find(core, table.task_id(slot)))]


def waits_for_clears(core: Core) -> bool:
    """Whether a task waits for a store to acknowledge its last clear."""
    return any(core.tasks.clears)


def could_train(core: Core, request: LeaseRequest) -> bool:
    """Whether a training task waits whose version is published."""
    return core._training_version(request, set()) is not None


def validate(core: Core) -> None:
    """What holds after every event."""
    trained = [slot for step, slots in core.batches.items() if step <= core.committed_step for slot in slots]
    assert core.uncovered == dict(core.held_in(trained))
    assert core.uncovered_bytes == core.held_in(trained).total()
    assert core.plan.deterministic or core.window.live <= core.plan.max_live
    assert sum(core.tasks.counts[1:]) == len(core.tasks) == len(core.tasks.state) - len(core.tasks.free)
    for stage, line in enumerate(core.ready):
        rest = copy.deepcopy(line)
        assert {rest.pop() for _ in range(len(rest))} >= set(core.waiting_for(stage))
