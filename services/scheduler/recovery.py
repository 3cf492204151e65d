"""Recovery from lost data: a store returns without its data or not at all, single shards or the end of the journal are
lost.

The module is pure. A store returns without its data if its host is lost or the run is resumed elsewhere. The store's
unfinished tasks are sampled again under higher fences. If it held shards of a batched step or a version, the run
returns to the newest checkpoint. Later steps cannot be replayed, so their tasks are reopened and trained again
(docs/architecture.md, promise 1; in deterministic mode from the same versions). The trainer reloads the checkpoint,
too, so weight updates from tasks that are trained again are not kept (promise 2). If the store held no such data, no
step is rolled back.

Permanently losing the store of a joined host costs less. The shards of trained tasks in such a store matter only to a
trainer that reloads, so a checkpoint is requested and the run continues without waiting for the store.

A store may also lose single shards, which its inventory or a reader reveals and the store confirms (`audits.py`). An
unfinished task is then sampled again, which does not count as a failed attempt. A task that belongs to a step is only
marked, because its shards may no longer be needed:

- open step: the failed read starts a new driver life, which finds the step reopened. The other tasks of the step keep
  their results, so if steps consume tasks in the order of admission, the step gets the same tasks in the same order.
  Workers that had begun the step are reloaded (`services/policy_trainer/resume.py`), so no task is trained twice
  (promise 2).
- committed step: a checkpoint is requested. A trainer that must reload before the checkpoint is saved returns to the
  previous one.

If a version is lost, `NextBatch` tells the driver to resume, and the driver publishes the version again.

After a power cut, the end of the journal may be missing. What the missing part recorded is unknown: tasks may have been
sampled, trained and collected, versions published, and leases granted. The run returns to the newest checkpoint in the
journal with fences, lineages and lease ids above any that might have been used, so stores and peers do not mistake lost
state for current state.
"""

from __future__ import annotations

from proto.messages import DropReason, PutTask, Register, TaskState
from services.scheduler.events import ShardsLost, TailLost
from services.scheduler.ledger import DEATH, FAILURE, TaskLedger
from services.scheduler.registry import RANKS, STORE
from services.scheduler.steps import rewind
from services.scheduler.tasks import Task
from shared.rundir import service_name
from shared.topology import TRAINER_STORE

TAIL_LOST = "the end of the journal was lost"
MARGIN = 1 << 16
"""Distance by which fences, lineages and lease ids jump beyond the highest numbers that a trace shows. The mark beside
the journal names the highest numbers at the last commit, but the mark may be out of date or unreadable."""


def register(ledger: TaskLedger, request: Register) -> None:
    """Register a new life of an instance, and end the leases of its previous life at once."""
    holder = (request.service, request.instance)
    for lease in ledger.leases.held_by(holder):
        if lease.incarnation != request.incarnation:
            ledger.give_up(lease, DEATH)
    is_empty = ledger.shards.register(request)
    if is_empty:
        _come_back_empty(ledger, service_name(*holder))
    if request.service == STORE:
        ledger.shards.clears.add_store(service_name(*holder))
    if request.service == STORE or request.service in RANKS:
        ledger.shards.note_trainer_stores(ledger.history.trained())


def expire(ledger: TaskLedger, lease_id: int, *, not_started: bool) -> bool:
    """End a lease that made no progress and retry its tasks. Return False if there is no such lease.

    This counts as a failed attempt if work on the tasks had begun.
    """
    lease = ledger.leases.get(lease_id)
    if lease is not None:
        ledger.give_up(lease, 0 if not_started else FAILURE)
    return lease is not None


# ---- lost stores


def _come_back_empty(ledger: TaskLedger, store: str) -> None:
    """Handle a store that has lost its data, including shards that services on its host had put there for their
    leases."""
    wanted = [task for tasks in ledger.history.batches.values() for task in tasks]
    if ledger.order.fixed:
        wanted += ledger.window.tasks.values()
    # Weight versions and the shards that the trainer puts for a step are not in the task table.
    if store == TRAINER_STORE or any(ledger.shards.lies_in(task, store) for task in wanted):
        _lose_store(ledger, store, "came back without its data")
        return
    for lease in list(ledger.leases):
        if store in ledger.shards.stores_of(lease.holder):
            ledger.give_up(lease, 0)
    again = _sample_without(ledger, store, "lost its data")
    cause = (
        f"{store} came back without its data: it held nothing that belongs to a step; {again} tasks are sampled again"
    )
    ledger.tell("scheduler/store_lost", {"store": store, "cause": cause})


def _lose_store(ledger: TaskLedger, store: str, why: str) -> None:
    """Return to the newest checkpoint without anything that was in the store."""
    step = max(ledger.history.checkpoint_step, 0)
    again = ledger.window.live
    replayed = ledger.history.committed_step - step
    _go_back(ledger, step, f"{store} lost its data")
    ledger.history.versions.forget(store)
    _lose_evaluations(ledger, step)
    cause = f"{store} {why}: back to step {step}; {replayed} steps and {again} tasks are repeated"
    ledger.tell("scheduler/store_lost", {"store": store, "cause": cause})


def _go_back(ledger: TaskLedger, step: int, why: str, *, reached: int = 0, cause: str = "") -> None:
    """Return to `step`, discarding all results of later steps and of waiting tasks.

    See `rewind` for the keyword arguments.
    """
    for lease in list(ledger.leases):
        ledger.give_up(lease, 0)
    rewind(ledger, step, reached=reached, cause=cause)
    ledger.history.require_resume()
    ledger.collect_steps(step)
    for task in [*ledger.window.tasks.values(), *ledger.unscored()]:
        if task.made:
            ledger.retry(task, 0, why)


def remove_departed_store(ledger: TaskLedger, store: str) -> bool:
    """Remove a joined store that is gone for good. Return False, and change nothing, if the store is not registered.

    Its pending clears count as done and its room is no longer used. Unfinished tasks with shards there are sampled
    again. So are tasks that are leased on its host, if the host has no other store that could take their results.
    """
    history, shards = ledger.history, ledger.shards
    row = shards.remove_store(store)
    if row is None:
        return False
    ledger.cleared(store, len(shards.clears.queues[store]))
    shards.clears.remove_store(store)
    shards.note_trainer_stores(history.trained())
    wanted: list[Task] = list(history.batches.get(history.committed_step + 1, ()))
    if ledger.order.fixed:
        wanted = [*ledger.window.tasks.values(), *(task for tasks in history.batches.values() for task in tasks)]
    if any(shards.lies_in(task, store) for task in wanted):  # the shards of an open step are being read
        _lose_store(ledger, store, "is gone")
        return True
    members = list(ledger.window.tasks.values())
    bereft = shards.holders_without_store(row.host_id)
    for lease in [lease for lease in ledger.leases if lease.holder in bereft]:
        ledger.give_up(lease, 0)
    _sample_without(ledger, store, "is gone")
    again = sum(not task.made for task in members)
    cause = f"{store} is gone: {again} tasks are now waiting for a rollout; steps since the checkpoint are saved next"
    ledger.tell("scheduler/store_lost", {"store": store, "cause": cause})
    return True


def _sample_without(ledger: TaskLedger, store: str, why: str) -> int:
    """Resample the unfinished tasks with shards in the store, and return how many of them were not leased."""
    lies_in = ledger.shards.lies_in
    for lease in list(ledger.leases):
        if any(lies_in(task, store) for task in lease.tasks.values()):
            ledger.give_up(lease, 0)
    lost = [task for task in (*ledger.window.tasks.values(), *ledger.unscored()) if lies_in(task, store)]
    for task in lost:
        if task.made:  # the retry of another task may have begun a new attempt of this one
            ledger.retry(task, 0, f"{store} {why}")
    return len(lost)


def _lose_evaluations(ledger: TaskLedger, step: int) -> None:
    """Drop the open tasks of evaluations whose versions will not be published again; their rows stay unscored.

    Such versions are lost versions before `step` or, in deterministic mode, lost versions that are too old for
    sampling. Other open evaluations continue when their version is published again. Scored rows keep their scores.
    """
    first = step - ledger.plan.staleness if ledger.order.fixed else step
    evaluations = ledger.history.evaluations.open.values()
    lost = [one for one in evaluations if one.version not in ledger.history.versions.refs and one.version[1] < first]
    for evaluation in lost:
        for lease in [lease for lease in ledger.leases if lease.measured == evaluation.version[1]]:
            ledger.give_up(lease, 0)
        ledger.sample_unscored([evaluation.version[1]])
        waiting, evaluation.waiting = evaluation.waiting, []
        for task_id in waiting:
            why = "the version's weights were lost with their store"
            ledger.drop(ledger.tasks[task_id], DropReason.WEIGHTS_LOST, why)


# ---- lost shards


def lose_shards(ledger: TaskLedger, event: ShardsLost) -> bool:
    """Resample or mark the tasks whose shards the store has lost.

    Return False if none of the tasks is current.
    """
    store, count = event.store, 0
    for lost in event.tasks:
        if ledger.history.is_live_version(store, lost):
            _lose_version(ledger, lost)
            count += 1
            continue
        task = ledger.tasks.find(lost.task_id)
        if task is None or task.fence != lost.fence or task.clears or task.lost:
            continue
        if not ledger.shards.lies_in(task, store):
            continue
        if task.state in (TaskState.BATCHED, TaskState.TRAINED):
            task.lost = True
        elif task.state in (TaskState.ROLLED_OUT, TaskState.READY):
            ledger.retry(task, 0, f"{store} lost its shards")
        else:
            continue
        count += 1
    if count:
        ledger.tell("scheduler/shards_lost", {"store": store, "tasks": float(count)})
    return count > 0


def _lose_version(ledger: TaskLedger, lost: PutTask) -> None:
    """Forget a version.

    Its store holds nothing of the version, which may therefore be put again under the same fence.
    """
    if ledger.history.lose_version(lost.task_id):
        away = ledger.shards.away_stores()  # these stores may hold damaged copies
        ledger.shards.clears.push((lost.task_id, lost.fence, False), away)
        _lose_evaluations(ledger, ledger.history.committed_step)


# ---- the lost end of the journal


def lose_tail(ledger: TaskLedger, event: TailLost) -> None:
    """Return to the newest checkpoint in the journal that no row of `metrics.jsonl` contradicts."""
    history = ledger.history
    ledger.skip_numbers(event.fence, MARGIN)
    history.begin_lineage(at_least=event.lineage, distance=0)
    step = min(max(history.checkpoint_step, 0), event.agreed)
    _go_back(ledger, step, TAIL_LOST, reached=event.reached, cause=TAIL_LOST)
    history.lower_checkpoint(step)
    history.begin_lineage(distance=MARGIN)
    for ref in history.versions.take_back(-1):
        ledger.shards.clear_version(ref)
    _lose_evaluations(ledger, step)
    ledger.raise_pending()
