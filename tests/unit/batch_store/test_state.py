"""Tests the store's index and its files without a bus: bounds, paging, recovery and torn tombstone lists."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from proto import blockfile
from proto.blockfile import BlockLayout, Table
from proto.messages import ErrorCode, PutTask
from services.batch_store import state as state_module
from services.batch_store.files import StoreFiles
from services.batch_store.room import Removal
from services.batch_store.state import MAX_TOMBSTONES, PAGE_TASKS, StoreState
from shared.dataplane.write import write_block
from shared.rpc.errors import RpcError


def sealed(state: StoreState, put_id: str, task_ids: list[str], fence: int = 1) -> None:
    layout = BlockLayout([(task_id, fence, {"a": np.zeros(1)}) for task_id in task_ids])
    state.begin(put_id, layout.file_bytes, [PutTask(task_id, fence) for task_id in task_ids], 0.0)
    table = blockfile.parse(layout.head([1] * len(task_ids)), layout.file_bytes)
    assert state.has_new_shards(put_id, table)
    state.seal(put_id, table)


def test_number_of_tombstones_is_bounded_and_those_that_files_need_are_kept() -> None:
    state = StoreState("store", 1 << 30, 1)
    sealed(state, "0" * 32, ["t/0/0", "t/0/1"])
    state.clear([PutTask("t/0/0", 1)])
    for first in range(0, 2 * MAX_TOMBSTONES, 8192):
        state.clear([PutTask(f"old/0/{first + i}", 1) for i in range(8192)])
    assert len(state.tombstones) <= MAX_TOMBSTONES
    assert state.tombstones["t/0/0"] == 1  # After a restart the task would still be in the file with t/0/1.
    assert f"old/0/{2 * MAX_TOMBSTONES - 1}" in state.tombstones
    assert "old/0/0" not in state.tombstones


def test_recovery_of_a_file_skips_the_tasks_that_were_cleared() -> None:
    before = StoreState("store", 1 << 30, 1)
    partly, wholly = "0" * 32, "1" * 32
    sealed(before, partly, ["t/0/0", "t/0/1"])
    sealed(before, wholly, ["t/0/2"])  # This task's file still existed when the store died.
    tables = {put_id: before.sealed(put_id).table for put_id in (partly, wholly)}
    cleared = [PutTask("t/0/0", 1), PutTask("t/0/2", 1)]
    before.clear(cleared)

    again = StoreState("store", 1 << 30, 2)
    again.recall(cleared)
    retired = [
        effect.source for put_id, table in tables.items() for effect in again.recover(put_id, table.file_bytes, table)
    ]
    assert retired == [f"{wholly}.blk"]
    assert again.inventory(0) == ([PutTask("t/0/1", 1)], 0)
    assert (again.stats().shards, again.stats().tasks, again.stats().files) == (1, 1, 1)


def test_inventory_pages_contain_every_task_once() -> None:
    state = StoreState("store", 1 << 30, 1)
    names = [f"t/0/{i}" for i in range(2 * PAGE_TASKS + 5)]
    sealed(state, "0" * 32, names)
    found: list[str] = []
    cursor, pages = 0, 0
    while True:
        page, cursor = state.inventory(cursor)
        found.extend(task.task_id for task in page)
        pages += 1
        if not cursor:
            break
    assert found == names
    assert pages == 3


def test_put_of_a_task_that_was_not_granted_is_refused() -> None:
    state = StoreState("store", 1 << 30, 1)
    layout = BlockLayout([("t/0/1", 1, {"a": np.zeros(1)})])
    state.begin("0" * 32, layout.file_bytes, [PutTask("t/0/2", 1)], 0.0)
    with pytest.raises(RpcError, match="tasks other than those granted") as caught:
        state.has_new_shards("0" * 32, blockfile.parse(layout.head([1]), layout.file_bytes))
    assert caught.value.code == ErrorCode.BAD_REQUEST


def test_open_put_id_with_a_different_size_is_a_conflict() -> None:
    state = StoreState("store", 1 << 30, 1)
    state.begin("0" * 32, 5000, [PutTask("t/0/2", 1)], 0.0)
    with pytest.raises(RpcError) as caught:
        state.begin("0" * 32, 5001, [PutTask("t/0/2", 1)], 0.0)
    assert caught.value.code == ErrorCode.CONFLICT


def test_grant_is_overdue_only_after_its_time_has_passed() -> None:
    state = StoreState("store", 1 << 30, 1)
    state.begin("0" * 32, 5000, [PutTask("t/0/2", 1)], 100.0)
    assert state.overdue(100.0 + state_module.GRANT_S) == []
    assert state.overdue(100.1 + state_module.GRANT_S) == ["0" * 32]


def test_torn_last_tombstone_is_dropped_and_the_list_stays_usable(tmp_path: Path) -> None:
    files = StoreFiles("store", tmp_path / "s")
    files.tombstones.append([PutTask("t/0/1", 4), PutTask("t/0/2", 5)])
    files.close()
    with (tmp_path / "s" / "tombstones").open("a") as stream:
        stream.write("6 t/0/")
    files = StoreFiles("store", tmp_path / "s")
    assert files.tombstones.read() == [PutTask("t/0/1", 4), PutTask("t/0/2", 5)]
    files.tombstones.append([PutTask("t/0/3", 6)])
    assert files.tombstones.read()[-1] == PutTask("t/0/3", 6)
    files.close()


def test_list_of_tombstones_is_rewritten_when_it_is_mostly_stale(tmp_path: Path) -> None:
    files = StoreFiles("store", tmp_path)
    for fence in range(6000):
        files.tombstones.append([PutTask("t/0/1", fence)])
    in_the_way = tmp_path / "tombstones.new"
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        files.tombstones.compact({"t/0/1": 5999})
    files.tombstones.append([PutTask("t/0/1", 6000)])
    assert files.tombstones.read()[-1] == PutTask("t/0/1", 6000)
    in_the_way.rmdir()
    files.tombstones.compact({"t/0/1": 5999})
    files.tombstones.append([PutTask("t/0/2", 1)])
    assert files.tombstones.read() == [PutTask("t/0/1", 5999), PutTask("t/0/2", 1)]
    files.close()


def test_directory_has_one_owner(tmp_path: Path) -> None:
    files = StoreFiles("store", tmp_path)
    with pytest.raises(RpcError, match="served by another process"):
        StoreFiles("store", tmp_path)
    files.close()
    StoreFiles("store", tmp_path).close()


def test_a_new_revision_replaces_only_the_previous_one() -> None:
    state = StoreState("store", 1 << 30, 1)
    files: dict[str, Table] = {}

    def put(number: int, names: list[str], keys: list[str]) -> list[str]:
        layout = BlockLayout([(name, 1, {key: np.full(9, number) for key in keys}) for name in names])
        put_id = f"{number:032x}"
        state.begin(put_id, layout.file_bytes, [PutTask(name, 1) for name in names], 0.0)
        files[f"{put_id}.blk"] = blockfile.parse(layout.head([number] * len(names) * len(keys)), layout.file_bytes)
        assert state.has_new_shards(put_id, files[f"{put_id}.blk"])
        state.seal(put_id, files[f"{put_id}.blk"])
        gone = [effect.source for effect in state.supersede(put_id)]
        for name in gone:
            del files[name]
        again = StoreState("store", 1 << 30, 2)  # A restart finds the same shards in the remaining files.
        for name, table in files.items():
            assert again.recover(name.removesuffix(".blk"), table.file_bytes, table) == []
        assert again.stats().shards == state.stats().shards
        return gone

    both = ["train/0/0", "train/0/1"]
    assert put(1, both, ["a", "p:1"]) == []
    assert put(2, both, ["p:2"]) == []  # The first file still has a current revision.
    assert put(3, both[:1], ["p:3"]) == []  # The second file still has the other task's revision.
    assert put(4, both[1:], ["q:3"]) == []
    assert state.stats().shards == 4 + 1 + 1 + 1
    assert put(5, both[1:], ["p:3"]) == [f"{2:032x}.blk"]
    assert state.stats().shards == 4 + 1 + 1 + 1
    assert put(6, ["weights/0/1"], ["w:1"]) == put(7, ["weights/0/1"], ["w:2"]) == []


def test_files_are_recovered_in_seal_order_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StoreFiles("store", tmp_path)
    for number, clock_ns in ((3, 5_000), (1, 5_000), (2, 4_000)):
        monkeypatch.setattr("time.time_ns", lambda now=clock_ns: now)
        files.create(f"{number:032x}", 100)
        files.seal(f"{number:032x}")
    assert [int(found.name[:32], 16) for found in files.scan()] == [3, 1, 2]
    files.close()
    again = StoreFiles("store", tmp_path)
    again.scan()
    again.create("4" * 32, 100)
    again.seal("4" * 32)
    assert [found.name[:1] for found in again.scan()][-1] == "4"
    again.close()


def test_files_of_a_store_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        memory, disk = tmp_path / "memory", tmp_path / "disk"
        files = StoreFiles("store", memory, disk)
        put_id = "0" * 32
        layout = BlockLayout([("t/0/1", 1, {"k": np.arange(9)})])
        path = Path(files.create(put_id, layout.file_bytes))
        body = np.arange(9).tobytes()
        path.write_bytes((head := layout.head([xxhash.xxh3_64_intdigest(body)])) + bytes(layout.offsets[0] - len(head)))
        with path.open("ab") as stream:
            stream.write(body)
        files.seal(put_id)
        assert files.copy_to_disk(put_id)
        files.finish_copy(put_id)
        for fence in range(6000):
            files.tombstones.append([PutTask("t/0/1", fence)])
        files.tombstones.compact({"t/0/1": 5999})
        files.retire(Removal(f"{put_id}.blk", "a.1-1.dead"))
        files.close()
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in (memory, disk, *memory.iterdir(), *disk.iterdir())}
    assert {"identity", "tombstones", "store.lock", "a.1-1.dead", f"{put_id}.blk"} <= found.keys()
    assert {
        name: mode for name, mode in found.items() if mode != (0o700 if name in ("memory", "disk") else 0o600)
    } == {}


def test_a_shard_that_was_put_twice_is_counted_once(tmp_path: Path) -> None:
    state = StoreState("store", 1 << 24, 1, 1 << 24)

    def put(number: int, keys: list[str]) -> str:
        put_id = f"{number:032x}"
        layout = BlockLayout([("train/0/0", 1, {key: np.zeros(100) for key in keys})])
        table = blockfile.parse(layout.head([7] * len(keys)), layout.file_bytes)
        state.begin(put_id, layout.file_bytes, [PutTask("train/0/0", 1)], 0.0)
        assert state.has_new_shards(put_id, table)
        state.seal(put_id, table)
        state.supersede(put_id)
        return put_id

    put(1, ["a"])
    both = put(2, ["a", "b"])
    assert state.stats().shards == 2
    put(3, ["c"])
    assert state.stats().shards == 3
    state.lose(both)
    assert state.stats().shards == 2
    state.clear([PutTask("train/0/0", 1)])
    assert (state.stats().shards, state.stats().tasks, state.stats().files) == (0, 0, 0)


def test_invalid_line_in_the_list_of_tombstones_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "tombstones").write_bytes(b"1 train/0/1\n1 x\n\xff\xfe\n-3 \n2 train/0/2\n3 train/0/")
    files = StoreFiles("store", tmp_path / "store")
    assert files.tombstones.read() == [PutTask("train/0/1", 1), PutTask("train/0/2", 2)]
    files.close()


def test_unreadable_file_is_left_alone_and_all_other_files_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StoreFiles("store", tmp_path / "store")
    for number in range(3):
        layout = BlockLayout([(f"train/0/{number}", 1, {"a": np.arange(1000)})])
        descriptor = os.open(files.create(f"{number:032x}", layout.file_bytes), os.O_RDWR)
        write_block(descriptor, layout)
        os.close(descriptor)
        files.seal(f"{number:032x}")
    reads = os.pread

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"{1:032x}.blk"):
            raise OSError(errno.EIO, "Input/output error")
        return reads(descriptor, nbytes, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        found = {each.name: each for each in files.scan()}
    bad = found.pop(f"{1:032x}.blk")
    assert bad.unreadable
    assert bad.table is None
    assert all(each.table is not None for each in found.values())
    assert len(found) == 2
    assert all(each.table is not None for each in files.scan())  # The next process can read the file.
    files.close()


def test_list_that_cannot_be_rewritten_for_lack_of_space_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StoreFiles("store", tmp_path / "store")
    files.tombstones.append([PutTask("train/0/0", 1)])

    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        files.tombstones.incomplete = True
        with pytest.raises(OSError, match="No space"):
            files.tombstones.compact({"train/0/0": 1, "train/0/1": 1})
    assert files.tombstones.incomplete
    assert not list((tmp_path / "store").glob("*.new"))
    files.tombstones.append([PutTask("train/0/2", 1)])
    files.tombstones.compact({"train/0/0": 1, "train/0/1": 1, "train/0/2": 1})
    assert not files.tombstones.incomplete
    assert files.tombstones.read() == [PutTask(f"train/0/{i}", 1) for i in range(3)]
    files.close()
