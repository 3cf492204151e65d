"""The stores that hold shards of each task, and the room left in each store. Pure.

Room of different stores is not added up, because a put goes into one store: those of rollouts and references into the
store of their host, those of the trainer into `TRAINER_STORE`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping

from proto.messages import Register
from services.scheduler.collection import ClearQueues
from services.scheduler.events import Configure
from services.scheduler.leases import Holder, Leases
from services.scheduler.plan import Plan
from services.scheduler.tasks import TaskTable
from services.scheduler.versions import Versions
from shared.rundir import service_name

STORE = "batch-store"
TRAINER_STORE = service_name(STORE, 0)
"""The store into which the trainer puts weights and its own log-probs."""
FULL_SHARE = 0.8
"""Share of a store's room for trained tasks above which their bytes cause a checkpoint."""


class Stores:
    """The ledger's state of stores. The bytes counted here are an upper bound of those that a store holds."""

    plan: Plan
    config: Configure
    tasks: TaskTable
    leases: Leases
    clears: ClearQueues
    versions: Versions
    registry: dict[Holder, Register]
    store_names: list[str]
    batches: dict[int, array[int]]
    uncovered: dict[str, int]
    """Bytes of trained tasks that wait for a checkpoint, by store."""

    gone: dict[str, str]
    """Joined stores that are gone for good, each with the `data_id` of its data."""

    # ---- locations of shards

    def _holders(self, slot: int) -> list[str]:
        """Return the stores that may hold shards of a task: those of its results and its lease, and the trainer's.

        Shards elsewhere (a late put of a former attempt) are strays, which reconciliation finds.
        """
        known = self.clears.stores
        if len(known) < 2:
            return known
        table = self.tasks
        may = {TRAINER_STORE, *(self.store_names[table.store[i][slot]] for i in self._made(slot))}
        lease = self.leases.get(table.lease[slot])
        if lease is not None:
            may |= self._stores_of(lease.holder)
        return [store for store in known if store in may]

    def _stores_of(self, holder: Holder) -> set[str]:
        """Return the stores on the host of `holder`, or all stores if there are none."""
        every = {service_name(*each): row for each, row in self.registry.items() if each[0] == STORE}
        row = self.registry.get(holder)
        same = {name for name, store in every.items() if row is not None and store.host_id == row.host_id}
        return same or set(every)

    def _without_store(self, host_id: str) -> set[Holder]:
        """Return all holders on a host, or none if the host has a store."""
        there = {holder for holder, row in self.registry.items() if row.host_id == host_id}
        return set() if any(service == STORE for service, _ in there) else there

    def _lies_in(self, slot: int, store: str) -> bool:
        """Return whether the store has accepted shards of a task."""
        return any(self.store_names[self.tasks.store[i][slot]] == store for i in self._made(slot))

    def _replayable(self, step: int) -> bool:
        """Return whether all shards of a trained step still exist."""
        slots = self.batches.get(step)
        return slots is not None and not any(self._lies_in(slot, store) for store in self.gone for slot in slots)

    def _made(self, slot: int) -> list[int]:
        """Return the stages of a task whose result is accepted."""
        done = self.tasks.done[slot]
        return [i for i in range(len(self.plan.stages)) if done >> i & 1]

    def _store_index(self, store: str) -> int:
        if store not in self.store_names:
            self.store_names.append(store)
        return self.store_names.index(store)

    # ---- room

    @property
    def limit_bytes(self) -> int:
        """Limit of all stores together, for display only: no single put can use it."""
        return sum(self._limits().values())

    @property
    def uncovered_bytes(self) -> int:
        """Bytes of trained tasks in all stores that wait for a checkpoint."""
        return sum(self.uncovered.values())

    def _limits(self) -> dict[str, int]:
        return {service_name(*holder): row.limit_bytes for holder, row in self.registry.items() if holder[0] == STORE}

    def _room_for_tasks(self) -> int:
        """Return the number of tasks for which there is room, in addition to those of the open batch.

        The location of a task's shards is unknown until it is leased, so each store has to have room for all of it.
        """
        if not self.plan.task_bytes:
            return self.plan.max_live
        limits = self._limits()
        free = min((limit - self._taken_bytes(store) for store, limit in limits.items()), default=0)
        return free // self.plan.task_bytes - self._open_batch_tasks()

    def _open_batch_tasks(self) -> int:
        raise NotImplementedError

    def _taken_bytes(self, store: str) -> int:
        """Return the bytes of a store that are not available for live tasks."""
        return self._set_aside_bytes(store) + self.uncovered.get(store, 0)

    def held_in(self, slots: Iterable[int]) -> Counter[str]:
        """Return the maximum bytes that trained tasks take in each store."""
        table, plan = self.tasks, self.plan
        held: Counter[str] = Counter()
        for slot in slots:
            mine = [(table.store[i][slot], table.part_bytes[i][slot]) for i in self._made(slot)]
            for index in {index for index, _ in mine}:
                nbytes = sum(size for at, size in mine if at == index)
                held[self.store_names[index]] += nbytes + plan.overhead_bytes
            if plan.unleased_token_bytes:
                if all(self.store_names[index] != TRAINER_STORE for index, _ in mine):
                    held[TRAINER_STORE] += plan.overhead_bytes
                held[TRAINER_STORE] += table.tokens[slot] * plan.unleased_token_bytes
        return held

    def _uncover(self, slots: Iterable[int]) -> None:
        """Count trained tasks that no checkpoint covers yet."""
        for store, nbytes in self.held_in(slots).items():
            self._set_uncovered(store, self.uncovered.get(store, 0) + nbytes)

    def _cover(self, slots: Iterable[int]) -> None:
        """Reverse `_uncover` when the tasks are collected."""
        for store, nbytes in self.held_in(slots).items():
            self._set_uncovered(store, self.uncovered.get(store, 0) - nbytes)

    def _set_uncovered(self, store: str, nbytes: int) -> None:
        if nbytes:
            self.uncovered[store] = nbytes
        else:
            self.uncovered.pop(store, None)

    def _set_aside_bytes(self, store: str) -> int:
        """Return the bytes reserved for weight versions and for a step that is replayed."""
        if store != TRAINER_STORE:
            return 0
        newest = self.versions.newest_ref
        one = max(self.plan.weight_bytes, newest.nbytes if newest else 0)
        return max(self.versions.nbytes, self.plan.weight_versions * one) + self.plan.replay_bytes

    def _wants_checkpoint(self, batch: Mapping[str, int]) -> bool:
        """Return whether trained bytes that no checkpoint covers are about to limit admission in any store.

        `batch` holds, by store, the bytes of a step that is about to be trained.
        """
        if self.uncovered.keys() & self.gone.keys():  # these steps cannot be replayed
            return True
        if not self.plan.task_bytes or self.config.collect_at_commit:
            return False
        live = self.plan.max_live * self.plan.task_bytes
        return any(
            self.uncovered.get(store, 0) + batch.get(store, 0)
            > FULL_SHARE * (limit - self._set_aside_bytes(store) - live)
            for store, limit in self._limits().items()
        )
