"""Tests the store's index under any sequence of events: bytes never exceed a limit, no data is lost, and no deleted
data returns."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto import blockfile
from proto.blockfile import BlockLayout, Table
from proto.ids import revised_name
from proto.messages import ErrorCode, PutTask
from services.batch_store import room
from services.batch_store.room import Removal, Tier, held_bytes
from services.batch_store.state import StoreState
from shared.rpc.errors import RpcError

pytestmark = pytest.mark.slow

LIMIT = 6 * 4096
SPILL = 4 * 4096
TASKS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=3, unique_by=lambda pair: pair[0]
)

KEYS = st.sampled_from([("a",), ("b",), ("a", "b"), ("p:1",), ("p:2",)])


def written(tasks: list[tuple[int, int]], keys: tuple[str, ...], value: int) -> tuple[Table, int]:
    layout = BlockLayout([(f"t/0/{n}", fence, {key: np.full(200, value + n) for key in keys}) for n, fence in tasks])
    head = layout.head([value * 100 + n for n, _ in tasks for _ in keys])
    return blockfile.parse(head, layout.file_bytes), layout.file_bytes


class StoreMachine(RuleBasedStateMachine):
    """A model that drives StoreState and keeps a plain record of the existing files and the shards in them."""

    def __init__(self) -> None:
        super().__init__()
        # In this test, files of a page or two are worth keeping.
        self.small = mock.patch.object(room, "SPARE_BYTES", 1)
        self.small.start()
        self.now = 0.0
        self.life = 1
        self.state = StoreState("store", LIMIT, self.life, SPILL)
        self.puts = 0
        self.open: dict[str, tuple[Table, int]] = {}
        self.sealed: dict[str, tuple[Table, int]] = {}
        self.order: list[str] = []
        self.disk: set[str] = set()
        self.moving: dict[str, int] = {}
        self.zombies: dict[str, tuple[Tier, int]] = {}
        self.lendable: dict[str, int] = {}
        self.spares: dict[str, tuple[int, float]] = {}
        self.lent = 0
        self.recovering = False
        self.tombs: dict[str, int] = {}
        self.shards: dict[tuple[str, int, str], int] = {}

    def teardown(self) -> None:
        self.small.stop()

    def retire(self, effects: list[Removal]) -> None:
        for effect in effects:
            put_id, _, kind = effect.source.partition(".")
            _, nbytes = (self.open if kind == "tmp" else self.sealed).pop(put_id)
            assert effect.target not in self.zombies
            assert effect.place == (Tier.DISK if put_id in self.disk else Tier.MEMORY)
            self.disk.discard(put_id)
            self.zombies[effect.target] = (effect.place, held_bytes(nbytes))
            if kind == "blk" and effect.place == Tier.MEMORY and not self.recovering:
                self.lendable[effect.target] = nbytes  # No process can have the file open for writing.

    def buried(self, task_id: str, fence: int) -> bool:
        return self.tombs.get(task_id, 0) >= fence

    def given_up(self, names: list[str]) -> None:
        for name in names:
            self.zombies[name] = (Tier.MEMORY, held_bytes(self.spares.pop(name)[0]))

    @rule(
        tasks=TASKS,
        keys=KEYS,
        value=st.integers(0, 1),
        room=st.booleans(),
        claimed=st.booleans(),
        made=st.booleans(),
    )
    def begin(
        self,
        tasks: list[tuple[int, int]],
        keys: tuple[str, ...],
        value: int,
        room: bool,
        claimed: bool,
        made: bool,
    ) -> None:
        self.granted(tasks, keys, value, room=room, claimed=claimed, made=made)

    def granted(
        self, tasks: list[tuple[int, int]], keys: tuple[str, ...], value: int, *, room: bool, claimed: bool, made: bool
    ) -> str | None:
        """Begin a put and return its id, or None if the put was refused or its file could not be created."""
        table, nbytes = written(tasks, keys, value)
        self.puts += 1
        put_id = f"{self.puts:032x}"
        names = [PutTask(f"t/0/{n}", fence) for n, fence in tasks]
        if room:
            self.make_room(put_id, nbytes)
        spare = self.state.spare(put_id, nbytes)
        assert (spare is not None) == any(size <= 2 * nbytes <= 4 * size for size, _ in self.spares.values())
        if spare is not None and not claimed:
            self.given_up([self.state.room.give_up_spare(spare)])
            spare = None
        used = self.state.room.used[Tier.MEMORY]
        if spare is not None:
            used -= held_bytes(self.spares[spare][0])
        try:
            assert self.state.begin(put_id, nbytes, names, 0.0, spare)
        except RpcError as error:
            code = error.code
        else:
            code = ""
        buried = any(self.buried(task.task_id, task.fence) for task in names)
        full = used + held_bytes(nbytes) > LIMIT
        assert code == (ErrorCode.COLLECTED if buried else ErrorCode.BUSY if full else "")
        if code:
            return None  # A file that was a spare is still a spare.
        if spare is not None:
            del self.spares[spare]
        if not made:
            self.state.forget(put_id)
            return None
        if spare is not None:
            self.state.room.lent += 1
            self.lent += 1
        assert not self.state.begin(put_id, nbytes, names, 0.0)
        assert self.state.spare(put_id, nbytes) is None  # The put already has its file.
        self.open[put_id] = (table, nbytes)
        return put_id

    @rule(tasks=TASKS, keys=KEYS, value=st.integers(0, 1))
    def put(self, tasks: list[tuple[int, int]], keys: tuple[str, ...], value: int) -> None:
        """Begin a put and seal it at once, as most producers do, so that later rules find sealed puts."""
        put_id = self.granted(tasks, keys, value, room=True, claimed=True, made=True)
        if put_id is not None:
            self.end(put_id, renamed=True)

    def make_room(self, put_id: str, nbytes: int) -> None:
        """Check that spares never block a put, and that no more of them are freed than the put needs."""
        before = dict(self.spares)
        names = self.state.make_room(put_id, nbytes)
        self.given_up(names)
        for name in names:
            del self.zombies[name]
            self.state.room.reaped(name)
        if self.state.lacks_room(put_id, nbytes):
            assert set(self.spares) <= {self.state.spare(put_id, nbytes)}
        elif names:
            last = held_bytes(before[names[-1]][0])
            mine = self.state.spare(put_id, nbytes)
            freed = held_bytes(self.spares[mine][0]) if mine is not None else 0
            assert self.state.room.used[Tier.MEMORY] - freed + held_bytes(nbytes) + last > LIMIT

    @rule(seconds=st.sampled_from([1.0, room.IDLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        names = self.state.room.surplus(self.now)
        self.given_up(names)
        assert all(self.now - since <= room.IDLE_S for _, since in self.spares.values())
        assert sum(size for size, _ in self.spares.values()) <= LIMIT // room.SHARE

    @precondition(lambda self: self.open)
    @rule(data=st.data(), renamed=st.booleans())
    def seal(self, data: st.DataObject, renamed: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.open))), renamed=renamed)

    def end(self, put_id: str, *, renamed: bool) -> None:
        """Request a seal as the producer does. Without `renamed`, the store dies in the middle of the seal."""
        table, nbytes = self.open[put_id]
        mine = {
            (task_id, fence, key): digest
            for index, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True))
            for key, digest in table.checksums(index).items()
        }
        late = any(self.buried(task_id, fence) for task_id, fence, _ in mine)
        clash = any(self.shards.get(name, digest) != digest for name, digest in mine.items())
        assert self.state.to_seal(put_id) == nbytes
        code, new = "", False
        try:
            new = self.state.has_new_shards(put_id, table)
        except RpcError as error:
            code = error.code
        assert code == (ErrorCode.COLLECTED if late else ErrorCode.CONFLICT if clash else "")
        if code:
            self.retire([self.state.abandon(put_id)])
            return
        assert new == (not mine.items() <= self.shards.items())
        if new and not renamed:
            assert self.state.to_seal(put_id) == nbytes  # A retry does not count as acknowledged.
        elif new:
            self.state.seal(put_id, table)
            self.sealed[put_id] = self.open.pop(put_id)
            self.order.append(put_id)
            self.shards |= mine
            assert self.state.to_seal(put_id) is None
            self.supersede(put_id)
        else:
            self.retire([self.state.abandon(put_id)])

    def supersede(self, put_id: str) -> None:
        """Check that a task keeps only the last shard of each key that has revisions, and that files without shards are
        gone."""
        self.retire(self.state.supersede(put_id))
        table = self.sealed[put_id][0]
        for index, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True)):
            names = {revised_name(key) for key in table.checksums(index)} - {None}
            for key in [key for t, f, key in self.shards if (t, f) == (task_id, fence)]:
                if revised_name(key) in names and key not in table.checksums(index):
                    del self.shards[task_id, fence, key]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def producer_dies(self, data: st.DataObject) -> None:
        put_id = data.draw(st.sampled_from(sorted(self.open)))
        assert put_id in self.state.overdue(100.0)
        self.retire([self.state.abandon(put_id)])

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def clear_what_is_here(self, data: st.DataObject) -> None:
        task_id, fence, _ = data.draw(st.sampled_from(sorted(self.shards)))
        self.clear([(int(task_id.rpartition("/")[2]), fence)])

    @rule(tasks=TASKS)
    def clear(self, tasks: list[tuple[int, int]]) -> None:
        names = [PutTask(f"t/0/{n}", fence) for n, fence in tasks]
        self.retire(self.state.clear(names))
        assert self.state.clear(names) == []
        assert self.state.entomb(names) == []
        for task in names:
            self.tombs[task.task_id] = max(self.tombs.get(task.task_id, 0), task.fence)
        self.shards = {name: d for name, d in self.shards.items() if not self.buried(name[0], name[1])}

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def last_mapping_goes(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(sorted(self.zombies)))
        kept = self.state.room.keep(target, self.now)
        assert kept == (target in self.lendable)
        del self.zombies[target]
        if kept:
            self.spares[target] = (self.lendable.pop(target), self.now)
        else:
            self.state.room.reaped(target)

    @rule()
    def begin_move(self) -> None:
        free = SPILL - self.state.room.used[Tier.DISK]
        fits = [
            put_id
            for put_id in self.order
            if put_id in self.sealed
            and put_id not in self.disk
            and put_id not in self.moving
            and held_bytes(self.sealed[put_id][1]) <= free
        ]
        chosen = self.state.begin_move()
        assert chosen == (fits[0] if fits else None)
        if chosen is not None:
            self.moving[chosen] = held_bytes(self.sealed[chosen][1])

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), copied=st.booleans())
    def end_move(self, data: st.DataObject, copied: bool) -> None:
        put_id = data.draw(st.sampled_from(sorted(self.moving)))
        nbytes = self.moving.pop(put_id)
        assert (self.state.place_of(put_id) is not None) == (put_id in self.sealed)
        if not copied or put_id not in self.sealed:
            self.state.give_up_move(put_id, retry=True)
            if put_id in self.sealed:  # This file is the next to be tried.
                self.order.remove(put_id)
                self.order.insert(0, put_id)
            return
        effect = self.state.end_move(put_id)
        assert (effect.source, effect.place) == (f"{put_id}.blk", Tier.MEMORY)
        self.zombies[effect.target] = (Tier.MEMORY, nbytes)
        self.disk.add(put_id)
        assert self.state.sealed(put_id).place == Tier.DISK

    @rule()
    def restart(self) -> None:
        self.life += 1
        self.state = StoreState("store", LIMIT, self.life, SPILL)
        self.given_up(list(self.spares))  # The restarted store does not lend a file that it cannot find.
        self.lendable.clear()
        self.lent = 0
        self.recovering = True
        self.moving.clear()  # Partially copied files are deleted before anything is counted.
        self.state.recall([PutTask(task_id, fence) for task_id, fence in self.tombs.items()])
        self.order = [put_id for put_id in self.sealed if put_id not in self.disk]
        for put_id, (table, nbytes) in list(self.sealed.items()):
            place = Tier.DISK if put_id in self.disk else Tier.MEMORY
            self.retire(self.state.recover(put_id, nbytes, table, place))
        for name, (place, nbytes) in list(self.zombies.items()):
            del self.zombies[name]
            self.zombies[self.state.recover_refuse(name, nbytes, place).target] = (place, nbytes)
        for put_id, (_, nbytes) in list(self.open.items()):
            self.retire([self.state.recover_refuse(f"{put_id}.tmp", nbytes)])
        self.recovering = False
        # The shards are the same as before: nothing is lost, and nothing cleared or superseded returns.

    @invariant()
    def bytes_are_exact_and_within_the_limit(self) -> None:
        stats = self.state.stats()
        held = [0, 0]
        for _, nbytes in self.open.values():
            held[Tier.MEMORY] += held_bytes(nbytes)
        for put_id, (_, nbytes) in self.sealed.items():
            held[put_id in self.disk] += held_bytes(nbytes)
        for place, nbytes in self.zombies.values():
            held[place] += nbytes
        spare = sum(held_bytes(nbytes) for nbytes, _ in self.spares.values())
        held[Tier.MEMORY] += spare
        held[Tier.DISK] += sum(self.moving.values())
        assert [self.state.room.used[place] for place in Tier] == held
        assert held[Tier.MEMORY] <= LIMIT
        assert held[Tier.DISK] <= SPILL
        assert stats.zombie_bytes == sum(nbytes for _, nbytes in self.zombies.values())
        assert (stats.spare_bytes, stats.lent) == (spare, self.lent)
        assert stats.bytes == sum(held)
        assert stats.limit_bytes == LIMIT + SPILL
        assert stats.files == len(self.sealed)
        assert stats.shards == len(self.shards)
        assert stats.tasks == len({task_id for task_id, _, _ in self.shards})
        assert stats.tombstones == len(self.tombs)

    @invariant()
    def exactly_the_living_shards_are_found(self) -> None:
        for task_id, fence in self.tombs.items():  # Readers of deleted tasks are told that the tasks were collected.
            with pytest.raises(RpcError, match="were collected"):
                self.state.locate([PutTask(task_id, fence)])
        living = {(task_id, fence) for task_id, fence, _ in self.shards}
        page, cursor = self.state.inventory(0)
        assert cursor == 0
        assert {(task.task_id, task.fence) for task in page} == living
        for task_id, fence in living:
            put_ids, [places] = self.state.locate([PutTask(task_id, fence)])
            found: dict[str, int] = {}
            for place in places:
                table = self.sealed[put_ids[place]][0]
                found |= table.checksums(table.index[task_id, fence])
            assert found == {key: d for (t, f, key), d in self.shards.items() if (t, f) == (task_id, fence)}


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=200)
