"""Recovery from lost data: a store returns without its data or not at all, or the end of the journal is lost.

The module is pure. A store returns without its data if its host is lost or the run is resumed elsewhere. The store's
unfinished tasks are sampled again under higher fences. If it held shards of a batched step or a version, the run
returns to the newest checkpoint. Later steps cannot be replayed, so their tasks are reopened and trained again
(docs/architecture.md, promise 1; in deterministic mode from the same versions). The trainer reloads the checkpoint,
too, so weight updates from tasks that are trained again are not kept (promise 2). If the store held no such data, no
step is rolled back.

Permanently losing the store of a joined host costs less. The shards of trained tasks in such a store matter only to a
trainer that reloads, so a checkpoint is requested and the run continues without waiting for the store.

After a power cut, the end of the journal may be missing. What the missing part recorded is unknown: tasks may have been
sampled, trained and collected, versions published, and leases granted. The run returns to the newest checkpoint in the
journal with fences, lineages and lease ids above any that might have been used, so stores and peers do not mistake lost
state for current state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proto.messages import DropReason, Register, TaskState
from services.scheduler.attempts import drop
from services.scheduler.collection import clear_weights, cleared, collect_steps
from services.scheduler.events import TailLost, Tell
from services.scheduler.leasing import give_up, measures
from services.scheduler.steps import rewind
from services.scheduler.stores import holders_without_store, lies_in, note_trainer_stores, stores_of
from services.scheduler.tasks import Task
from shared.rundir import parse_service_name, service_name
from shared.topology import TRAINER_STORE

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState


TAIL_LOST = "the end of the journal was lost"
MARGIN = 1 << 16
"""Distance by which fences, lineages and lease ids jump beyond the highest numbers that a trace shows. The mark beside
the journal names the highest numbers at the last commit, but the mark may be out of date or unreadable."""


def lost_data(run: RunState, old: Register | None, new: Register) -> bool:
    """Return whether a store registers again without data that the run still needs."""
    if old is not None:
        return old.data_id != new.data_id
    name = service_name(new.service, new.instance)
    return run.gone.pop(name, new.data_id) != new.data_id and name in run.uncovered


def come_back_empty(run: RunState, store: str) -> None:
    """Handle a store that has lost its data, including shards that services on its host had put there for their
    leases."""
    wanted = [task for tasks in run.batches.values() for task in tasks]
    if run.order.fixed:
        wanted += run.window.tasks.values()
    # Weight versions and the shards that the trainer puts for a step are not in the task table.
    if store == TRAINER_STORE or any(lies_in(run, task, store) for task in wanted):
        _lose_store(run, store, "came back without its data")
        return
    for lease in list(run.leases):
        if store in stores_of(run, lease.holder):
            give_up(run, lease, 0)
    again = _sample_without(run, store, "lost its data")
    cause = (
        f"{store} came back without its data: it held nothing that belongs to a step; {again} tasks are sampled again"
    )
    run.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))


def _lose_store(run: RunState, store: str, why: str) -> None:
    """Return to the newest checkpoint without anything that was in the store."""
    step = max(run.checkpoint_step, 0)
    again = run.window.live
    replayed = run.committed_step - step
    _go_back(run, step, f"{store} lost its data")
    run.versions.forget(store)
    lose_evaluations(run, step)
    cause = f"{store} {why}: back to step {step}; {replayed} steps and {again} tasks are repeated"
    run.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))


def _go_back(run: RunState, step: int, why: str, *, reached: int = 0, cause: str = "") -> None:
    """Return to `step`, discarding all results of later steps and of waiting tasks.

    See `rewind` for the keyword arguments.
    """
    for lease in list(run.leases):
        give_up(run, lease, 0)
    rewind(run, step, reached=reached, cause=cause)
    run.finished = run.finished and run.committed_step >= run.config.steps
    run.lineage += 1  # versions trained from now on differ from those published before
    run.driver = 0  # the driver must resume: its workers and its published version are not at `step`
    collect_steps(run, step)
    for task in list(run.window.tasks.values()):
        if task.made:
            run.order.retry(run, task, 0, why)


def lose_tail(run: RunState, event: TailLost) -> None:
    """Return to the newest checkpoint in the journal that no row of `metrics.jsonl` contradicts."""
    run.highest_fence = max(run.highest_fence, event.fence) + MARGIN
    run.tasks.least_fence = run.highest_fence + 1
    run.lineage = max(run.lineage, event.lineage)
    step = min(max(run.checkpoint_step, 0), event.agreed)
    _go_back(run, step, TAIL_LOST, reached=event.reached, cause=TAIL_LOST)
    run.checkpoint_step = min(run.checkpoint_step, step or -1)  # later checkpoints hold the weights of other steps
    run.lineage += MARGIN
    run.leases.next_id += MARGIN
    for ref in run.versions.take_back(-1):
        clear_weights(run, ref)
    lose_evaluations(run, step)
    for task in run.tasks:
        if task.state == TaskState.PENDING:
            run.tasks.edit(task).fence = max(task.fence, run.tasks.least_fence)
    run.highest_fence = max(run.highest_fence, run.tasks.least_fence)


def remove_departed_store(run: RunState, store: str) -> bool:
    """Remove a joined store that is gone for good. Return False, and change nothing, if the store is not registered.

    Its pending clears count as done and its room is no longer used. Unfinished tasks with shards there are sampled
    again. So are tasks that are leased on its host, if the host has no other store that could take their results.
    """
    row = run.registry.remove(parse_service_name(store))
    if row is None:
        return False
    run.gone[store] = row.data_id
    cleared(run, store, run.clears.pending_at(store))
    run.clears.remove_store(store)
    note_trainer_stores(run)
    wanted: list[Task] = list(run.batches.get(run.committed_step + 1, ()))
    if run.order.fixed:
        wanted = [*run.window.tasks.values(), *(task for tasks in run.batches.values() for task in tasks)]
    if any(lies_in(run, task, store) for task in wanted):  # the shards of an open step are being read
        _lose_store(run, store, "is gone")
        return True
    members = list(run.window.tasks.values())
    bereft = holders_without_store(run, row.host_id)
    for lease in [each for each in run.leases if each.holder in bereft]:
        give_up(run, lease, 0)
    _sample_without(run, store, "is gone")
    again = sum(not task.made for task in members)
    cause = f"{store} is gone: {again} tasks are now waiting for a rollout; steps since the checkpoint are saved next"
    run.out.append(Tell("scheduler/store_lost", {"store": store, "cause": cause}))
    return True


def _sample_without(run: RunState, store: str, why: str) -> int:
    """Resample the unfinished tasks with shards in the store, and return how many of them were not leased."""
    for lease in list(run.leases):
        if any(lies_in(run, task, store) for task in lease.tasks.values()):
            give_up(run, lease, 0)
    lost = [task for task in run.window.tasks.values() if lies_in(run, task, store)]
    for task in lost:
        if task.made:  # the retry of another task may have begun a new attempt of this one
            run.order.retry(run, task, 0, f"{store} {why}")
    return len(lost)


def lose_evaluations(run: RunState, step: int) -> None:
    """Drop the open tasks of evaluations whose versions will not be published again; their rows stay unscored.

    Such versions are lost versions before `step` or, in deterministic mode, lost versions that are too old for
    sampling. Other open evaluations continue when their version is published again. Scored rows keep their scores.
    """
    first = step - run.plan.staleness if run.order.fixed else step
    evaluations = [each for each in run.evaluations.open.values() if run.versions.get(each.version) is None]
    for one in [each for each in evaluations if each.version[1] < first]:
        for lease in [each for each in run.leases if measures(each) and each.version == one.version]:
            give_up(run, lease, 0)
        waiting, one.waiting = one.waiting, []
        for task_id in waiting:
            why = "the version's weights were lost with their store"
            drop(run, run.tasks.known(task_id), DropReason.WEIGHTS_LOST, why)
