"""The room left in each store, and the stores that hold shards of each task. The module is pure.

The room in different stores is not added up, because each put goes into a single store: rollouts, references and
trainer ranks put their shards into their host's store, and weights are put into `TRAINER_STORE`. The bytes counted here
are an upper bound on the bytes that a store holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.leases import Holder
from services.scheduler.tasks import Task
from shared.rundir import service_name
from shared.topology import TRAINER_STORE
from shared.topology.models import POLICY_WORKER

if TYPE_CHECKING:
    from services.scheduler.run_state import RunState

STORE, RANK = "batch-store", POLICY_WORKER
FORERUNNERS = 2
"""Maximum number of stores that a store tries for a version before the trainer's store."""
FULL_SHARE = 0.8
"""Fraction of a store's room that trained tasks may take up before a checkpoint is requested."""


# ---- locations of shards


def stores_of(run: RunState, holder: Holder) -> list[str]:
    """Return the stores on the host of `holder`, or all stores if that host has none."""
    row = run.registry.get(holder)
    there = run.registry.on_host(row.host_id) if row is not None else []
    return [service_name(*each) for each in there if each[0] == STORE] or list(run.registry.stores)


def holders_without_store(run: RunState, host_id: str) -> set[Holder]:
    """Return all holders on a host, or an empty set if the host has a store."""
    there = set(run.registry.on_host(host_id))
    return set() if any(service == STORE for service, _ in there) else there


def is_away(run: RunState, store: str) -> bool:
    """Return whether a store is, or might be, on a host other than the trainer's, and so might hold copies of
    versions."""
    home, row = run.registry.stores.get(TRAINER_STORE), run.registry.stores.get(store)
    return row is not None and row is not home and (home is None or row.host_id != home.host_id)


def away_stores(run: RunState) -> list[str]:
    """Return the stores on hosts other than the trainer's."""
    return [store for store in run.registry.stores if is_away(run, store)]


def upstream(run: RunState, store: Holder, is_present: Callable[[Holder], bool]) -> list[str]:
    """Return up to `FORERUNNERS` stores that `store` tries for weights before the trainer's store, nearest first.

    The stores on hosts other than the trainer's form a chain in the order of their numbers, so that each host sends a
    version once. A host with two successors would need twice as long to serve both (tests/bench/relay.py).
    """
    if not is_away(run, service_name(*store)):
        return []
    before = ((STORE, number) for number in range(store[1] - 1, -1, -1))
    names = (service_name(*holder) for holder in before if holder in run.registry and is_present(holder))
    return list(islice((name for name in names if is_away(run, name)), FORERUNNERS))


def trainer_stores(run: RunState) -> tuple[str, ...]:
    """Return the stores into which trainer ranks put log-probs, in order."""
    if not run.plan.unleased_token_bytes:
        return (TRAINER_STORE,)
    hosts = {run.registry[rank].host_id for rank in run.registry.ranks}
    there = (each for host in hosts for each in run.registry.on_host(host) if each[0] == STORE)
    return tuple(sorted({TRAINER_STORE, *(service_name(*each) for each in there)}))


def note_trainer_stores(run: RunState) -> None:
    """Bring `run.trainer_stores` up to date.

    If the stores have changed, recount the bytes that are waiting for a checkpoint.
    """
    stores = trainer_stores(run)
    if stores != run.trainer_stores:
        run.trainer_stores = stores
        trained = (task for step, tasks in run.batches.items() if step <= run.committed_step for task in tasks)
        run.uncovered = dict(held_in(run, trained))


def lies_in(run: RunState, task: Task, store: str) -> bool:
    """Return whether the store holds shards of the task's accepted results."""
    for part in task.parts:  # noqa: SIM110  # called for every live task when a store is lost: a generator takes longer
        if part is not None and run.store_names[part.store] == store:
            return True
    return False


def replayable(run: RunState, step: int) -> bool:
    """Return whether all shards of a trained step still exist."""
    tasks = run.batches.get(step)
    if tasks is None or any(task.lost for task in tasks):
        return False
    return not any(lies_in(run, task, store) for store in run.gone for task in tasks)


def store_index(run: RunState, store: str) -> int:
    """Return the index by which tasks refer to a store."""
    if store not in run.store_names:
        run.store_names.append(store)
    return run.store_names.index(store)


# ---- room


def limits(run: RunState) -> dict[str, int]:
    """Return each store's limit in bytes."""
    return {name: row.limit_bytes for name, row in run.registry.stores.items()}


def room_for_tasks(run: RunState) -> int:
    """Return the number of tasks for which there is room, in addition to those of the open batch.

    The location of a task's shards is unknown until the task is leased, so each store must have room for all of them.
    """
    if not run.plan.task_bytes:
        return run.plan.max_live
    free = min((room - run.uncovered.get(store, 0) for store, room in _rooms(run)), default=0)
    return free // run.plan.task_bytes - len(run.open_batch)


def _rooms(run: RunState) -> Iterator[tuple[str, int]]:
    """Yield each store with the number of bytes within its limit that are not reserved.

    Bytes are reserved for weight versions, for samples to record and, in the stores of the trainer ranks, for a step
    that is replayed.
    """
    newest = run.versions.get(run.versions.newest) if run.versions.newest is not None else None
    one = max(run.plan.weight_bytes, newest.nbytes if newest else 0)
    versions = max(run.versions.nbytes, run.plan.weight_versions * one)
    for store, row in run.registry.stores.items():
        reserved = run.plan.record_bytes + (run.plan.replay_bytes if store in run.trainer_stores else 0)
        if store == TRAINER_STORE or is_away(run, store):
            reserved += versions
        yield store, row.limit_bytes - reserved


def held_in(run: RunState, tasks: Iterable[Task]) -> Counter[str]:
    """Return the maximum number of bytes that trained tasks take up in each store. Any rank may have put the log-probs
    of a task."""
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
    """Add the bytes of trained tasks that no checkpoint covers yet, or subtract them if `sign` is -1."""
    for store, nbytes in held_in(run, tasks).items():
        run.uncovered[store] = run.uncovered.get(store, 0) + sign * nbytes
        if not run.uncovered[store]:
            del run.uncovered[store]


def wants_checkpoint(run: RunState, batch: Mapping[str, int]) -> bool:
    """Return whether any trained steps that no checkpoint covers cannot be replayed or are about to limit admission.

    `batch` holds, by store, the bytes of a step that is about to be trained.
    """
    trained = (tasks for step, tasks in run.batches.items() if step <= run.committed_step)
    if run.uncovered.keys() & run.gone.keys() or any(task.lost for tasks in trained for task in tasks):
        return True
    if not run.plan.task_bytes or run.config.collect_at_commit:
        return False
    live = run.plan.max_live * run.plan.task_bytes
    return any(
        run.uncovered.get(store, 0) + batch.get(store, 0) > FULL_SHARE * (room - live) for store, room in _rooms(run)
    )
