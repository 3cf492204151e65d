"""The room left in each store, and the stores that hold shards of each task. Pure.

Room of different stores is not added up, because a put goes into the store of its host: those of weights into
`TRAINER_STORE`, the log-probs of the trainer into the stores of its ranks' hosts. The bytes counted here are an upper
bound of those that a store holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from services.scheduler.leases import Holder
from services.scheduler.tasks import Task
from shared.rundir import service_name
from shared.topology import TRAINER_STORE

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

STORE, RANK = "batch-store", "policy-trainer-worker"
FULL_SHARE = 0.8
"""Share of a store's room for trained tasks above which their bytes cause a checkpoint."""


# ---- locations of shards


def stores_of(run: RunState, holder: Holder) -> set[str]:
    """Return the stores on the host of `holder`, or all stores if there are none."""
    every = {service_name(*each): row for each, row in run.registry.items() if each[0] == STORE}
    row = run.registry.get(holder)
    same = {name for name, store in every.items() if row is not None and store.host_id == row.host_id}
    return same or set(every)


def holders_without_store(run: RunState, host_id: str) -> set[Holder]:
    """Return all holders on a host, or none if the host has a store."""
    there = {holder for holder, row in run.registry.items() if row.host_id == host_id}
    return set() if any(service == STORE for service, _ in there) else there


def trainer_stores(run: RunState) -> tuple[str, ...]:
    """Return the stores into which ranks of the trainer put log-probs, in order."""
    if not run.plan.unleased_token_bytes:
        return (TRAINER_STORE,)
    hosts = {row.host_id for (service, _), row in run.registry.items() if service == RANK}
    there = (each for each, row in run.registry.items() if each[0] == STORE and row.host_id in hosts)
    return tuple(sorted({TRAINER_STORE, *(service_name(*each) for each in there)}))


def note_trainer_stores(run: RunState) -> None:
    """Bring `run.trainer_stores` up to date. If it has changed, count again what waits for a checkpoint."""
    stores = trainer_stores(run)
    if stores != run.trainer_stores:
        run.trainer_stores = stores
        trained = (task for step, tasks in run.batches.items() if step <= run.committed_step for task in tasks)
        run.uncovered = dict(held_in(run, trained))


def lies_in(run: RunState, task: Task, store: str) -> bool:
    """Return whether the store has accepted shards of a task."""
    return any(run.store_names[part.store] == store for part in task.made)


def replayable(run: RunState, step: int) -> bool:
    """Return whether all shards of a trained step still exist."""
    tasks = run.batches.get(step)
    if tasks is None or any(task.lost for task in tasks):
        return False
    return not any(lies_in(run, task, store) for store in run.gone for task in tasks)


def store_index(run: RunState, store: str) -> int:
    """Return the number by which tasks name a store."""
    if store not in run.store_names:
        run.store_names.append(store)
    return run.store_names.index(store)


# ---- room


def limits(run: RunState) -> dict[str, int]:
    """Return the limit of each store in bytes."""
    return {service_name(*holder): row.limit_bytes for holder, row in run.registry.items() if holder[0] == STORE}


def room_for_tasks(run: RunState) -> int:
    """Return the number of tasks for which there is room, in addition to those of the open batch.

    The location of a task's shards is unknown until it is leased, so each store has to have room for all of it.
    """
    if not run.plan.task_bytes:
        return run.plan.max_live
    free = min(
        (limit - _set_aside_bytes(run, store) - run.uncovered.get(store, 0) for store, limit in limits(run).items()),
        default=0,
    )
    return free // run.plan.task_bytes - len(run.open_batch)


def _set_aside_bytes(run: RunState, store: str) -> int:
    """Return the bytes reserved for weight versions and for a step that is replayed."""
    replay = run.plan.replay_bytes if store in run.trainer_stores else 0
    if store != TRAINER_STORE:
        return replay
    newest = run.versions.get(run.versions.newest) if run.versions.newest is not None else None
    one = max(run.plan.weight_bytes, newest.nbytes if newest else 0)
    return max(run.versions.nbytes, run.plan.weight_versions * one) + replay


def held_in(run: RunState, tasks: Iterable[Task]) -> Counter[str]:
    """Return the maximum bytes that trained tasks take in each store. Any rank may have put the log-probs of a task."""
    plan = run.plan
    held: Counter[str] = Counter()
    for task in tasks:
        stores = {part.store for part in task.made}
        for part in task.made:
            held[run.store_names[part.store]] += part.nbytes
        for store in stores:
            held[run.store_names[store]] += plan.overhead_bytes
        for name in run.trainer_stores if plan.unleased_token_bytes else ():
            if all(run.store_names[store] != name for store in stores):
                held[name] += plan.overhead_bytes
            held[name] += task.tokens * plan.unleased_token_bytes
    return held


def count_uncovered(run: RunState, tasks: Iterable[Task], sign: int) -> None:
    """Count trained tasks that no checkpoint covers yet, or with -1 no longer count them."""
    for store, nbytes in held_in(run, tasks).items():
        run.uncovered[store] = run.uncovered.get(store, 0) + sign * nbytes
        if not run.uncovered[store]:
            del run.uncovered[store]


def wants_checkpoint(run: RunState, batch: Mapping[str, int]) -> bool:
    """Return whether trained steps that no checkpoint covers cannot be replayed, or are about to limit admission.

    `batch` holds, by store, the bytes of a step that is about to be trained.
    """
    trained = (tasks for step, tasks in run.batches.items() if step <= run.committed_step)
    if run.uncovered.keys() & run.gone.keys() or any(task.lost for tasks in trained for task in tasks):
        return True
    if not run.plan.task_bytes or run.config.collect_at_commit:
        return False
    live = run.plan.max_live * run.plan.task_bytes
    return any(
        run.uncovered.get(store, 0) + batch.get(store, 0) > FULL_SHARE * (limit - _set_aside_bytes(run, store) - live)
        for store, limit in limits(run).items()
    )
