"""Tests that pages of collected files are lent, as spares, to the next put of similar size. Spares are counted, can be
discarded, and cannot be read.
"""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from proto.blockfile import BlockLayout, parse
from proto.messages import ErrorCode, PutTask
from services.batch_store import room
from services.batch_store.files import StoreFiles
from services.batch_store.retirement import Retirement
from services.batch_store.room import IDLE_S, Spares, Tier, held_bytes
from services.batch_store.state import StoreState
from shared.dataplane import reused_pages
from shared.dataplane.mapping import BlockMapping, TableCache, lock_named
from shared.dataplane.reused_pages import POPULATE_BYTES, ReadMappingPool, WriteMappingPool
from shared.dataplane.write import copy_block, write_block
from shared.rpc.errors import RpcError

VALUES = np.arange(40_000, dtype=np.float32)


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SPARE_BYTES", 1)
    monkeypatch.setattr(reused_pages, "MIN_BYTES", 1)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a folder in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Store:
    """An index and its files, driven as the server drives them."""

    def __init__(self, folder: Path, limit: int = 1 << 20, spill: Path | None = None) -> None:
        self.index = StoreState("store", limit, 1)
        self.files = StoreFiles("store", folder, spill)
        self.ended = Retirement("store", self.index.room, self.files, lambda: self.now)
        self.puts = 0
        self.now = 0.0

    def begin(self, layout: BlockLayout, task_id: str) -> tuple[str, str]:
        self.puts += 1
        put_id = f"{self.puts:032x}"
        self.delete(self.index.make_room(put_id, layout.file_bytes))
        spare = self.index.spare(put_id, layout.file_bytes)
        if spare is not None:
            assert self.files.claim(spare)
        assert self.index.begin(put_id, layout.file_bytes, [PutTask(task_id, 1)], 0.0, spare)
        if spare is None:
            return put_id, self.files.create(put_id, layout.file_bytes)
        path = self.files.reuse(spare, put_id, layout.file_bytes)
        self.index.room.lent += 1
        return put_id, path

    def put(self, task_id: str, values: np.ndarray) -> str:  # type: ignore[type-arg]
        layout = BlockLayout([(task_id, 1, {"w": values})])
        put_id, path = self.begin(layout, task_id)
        descriptor = os.open(path, os.O_RDWR)
        write_block(descriptor, layout)
        os.close(descriptor)
        table = self.files.read_table(f"{put_id}.tmp")
        assert self.index.has_new_shards(put_id, table)
        self.files.seal(put_id)
        self.index.seal(put_id, table)
        return self.files.path(f"{put_id}.blk")

    def clear(self, task_id: str) -> None:
        self.ended.take(self.index.clear([PutTask(task_id, 1)]))

    def reap(self) -> None:
        self.ended.settle()

    def delete(self, names: list[str]) -> None:
        """Delete the files of spares that the index has discarded."""
        self.ended.free(names)


def test_pages_of_collected_weights_are_lent_to_the_next_version(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    path = store.put("weights/0/0", VALUES)
    inode = os.stat(path).st_ino
    used = store.index.room.used[Tier.MEMORY]
    store.clear("weights/0/0")
    assert not os.path.exists(path)
    assert store.index.room.used[Tier.MEMORY] == used  # The spare is kept and counted.
    again = store.put("weights/0/1", VALUES * 2)
    assert os.stat(again).st_ino == inode
    assert again != path
    assert store.index.room.used[Tier.MEMORY] == used
    found = BlockMapping(again, TableCache()).arrays([0], None)[0]
    assert np.array_equal(found["w"], VALUES * 2)


def test_pages_of_weights_that_a_reader_maps_are_not_lent(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    path = store.put("weights/0/0", VALUES)
    reader = BlockMapping(path, TableCache()).arrays([0], None)[0]
    store.clear("weights/0/0")
    other = store.put("weights/0/1", VALUES * 2)
    assert np.array_equal(reader["w"], VALUES)
    del reader
    store.reap()
    third = store.put("weights/0/2", VALUES * 3)
    assert os.stat(third).st_ino != os.stat(other).st_ino
    assert np.array_equal(BlockMapping(other, TableCache()).arrays([0], None)[0]["w"], VALUES * 2)


def test_a_lent_file_is_not_a_block_file_until_it_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.put("weights/0/0", VALUES)
    store.clear("weights/0/0")
    layout = BlockLayout([("weights/0/1", 1, {"w": VALUES})])
    _, path = store.begin(layout, "weights/0/1")
    data = Path(path).read_bytes()
    with pytest.raises(Exception, match="magic"):
        parse(data, len(data))


def test_only_as_many_spares_as_needed_are_deleted_starting_with_the_longest_idle(tmp_path: Path) -> None:
    nbytes = held_bytes(BlockLayout([("train/0/0", 1, {"w": VALUES})]).file_bytes)
    store = Store(tmp_path / "s", limit=6 * nbytes)
    for number in range(3):
        store.put(f"train/0/{number}", VALUES)
    for number in range(3):
        store.clear(f"train/0/{number}")
    stats = store.index.stats()
    assert (stats.bytes, stats.spare_bytes, stats.files, stats.lent) == (3 * nbytes, 3 * nbytes, 0, 0)
    larger = BlockLayout([("train/0/3", 1, {"w": np.resize(VALUES, 4 * len(VALUES))})])
    # The put is four times as large, so no spare fits, and one of three must make room.
    store.begin(larger, "train/0/3")
    stats = store.index.stats()
    assert stats.spare_bytes == 2 * nbytes
    assert stats.bytes == 2 * nbytes + held_bytes(larger.file_bytes)
    assert len(list((tmp_path / "s").glob("*.dead"))) == 2
    assert [name.partition(".")[0] for name in store.index.room.spares.all_but(None)] == [f"{2:032x}", f"{3:032x}"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_collected_during_its_copy_to_disk_is_copied_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    store = Store(tmp_path / "s", spill=tmp_path / "disk")
    if not kept:
        monkeypatch.setattr(room, "SPARE_BYTES", 1 << 30)
    put_id = Path(store.put("train/0/0", VALUES)).stem
    send = os.sendfile

    def collected_first(target: int, source: int, at: int, count: int) -> int:
        store.clear("train/0/0")
        # The file is in use, so it is neither truncated nor lent.
        assert store.index.stats().zombie_bytes > VALUES.nbytes
        return send(target, source, at, count)

    monkeypatch.setattr(os, "sendfile", collected_first)
    assert store.files.copy_to_disk(put_id)
    store.files.drop_copy(put_id)
    store.reap()
    assert (store.index.stats().spare_bytes > 0) == kept
    assert store.index.stats().zombie_bytes == 0


def test_a_put_that_takes_a_spare_needs_room_only_for_the_difference(tmp_path: Path) -> None:
    layout = BlockLayout([("train/0/0", 1, {"w": VALUES})])
    more = np.resize(VALUES, len(VALUES) + 1024)
    store = Store(tmp_path / "s", limit=held_bytes(layout.file_bytes) + 4096)
    store.index.room.spares._max_bytes = store.index.room.limits[Tier.MEMORY]
    store.put("train/0/0", VALUES)
    store.clear("train/0/0")
    assert not store.index.lacks_room("f" * 32, layout.file_bytes)
    store.put("train/0/1", more)
    assert store.index.stats().lent == 1
    assert store.index.room.used[Tier.MEMORY] == store.index.room.limits[Tier.MEMORY]
    with pytest.raises(RpcError) as caught:
        store.put("train/0/2", VALUES)
    assert caught.value.code == ErrorCode.BUSY


def test_a_spare_is_resized_to_the_put_that_takes_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", limit=1 << 22)
    inodes = set()
    for number, length in enumerate((40_000, 25_000, 45_000, 31_234, 31_000)):
        values = np.arange(length, dtype=np.float32) + number
        path = store.put(f"train/0/{number}", values)
        inodes.add(os.stat(path).st_ino)
        assert store.index.room.used[Tier.MEMORY] == held_bytes(os.stat(path).st_size)
        assert np.array_equal(BlockMapping(path, TableCache()).arrays([0], None)[0]["w"], values)
        store.clear(f"train/0/{number}")
    assert len(inodes) == 1


def test_a_put_takes_the_spare_nearest_in_size_but_never_one_of_a_very_different_size() -> None:
    spares = Spares(1 << 40)
    for name, nbytes in (("a", 100), ("b", 130), ("c", 130), ("d", 400)):
        spares.add(name, nbytes, 0.0)
    asked = {40: None, 50: "a", 114: "a", 116: "b", 130: "c", 260: "c", 300: "d", 800: "d", 801: None}
    assert {nbytes: spares.nearest(nbytes) for nbytes in asked} == asked
    assert (spares.take("c"), spares.nearest(130)) == (130, "b")


def test_idle_and_surplus_spares_are_deleted(tmp_path: Path) -> None:
    nbytes = held_bytes(BlockLayout([("train/0/0", 1, {"w": VALUES})]).file_bytes)
    store = Store(tmp_path / "s", limit=6 * nbytes)
    for number in range(4):
        store.put(f"train/0/{number}", VALUES)
    for number in range(4):
        store.now = float(number)
        store.clear(f"train/0/{number}")
    store.delete(store.index.room.surplus(store.now))
    assert store.index.stats().spare_bytes == 3 * nbytes  # Spares take up half of the limit.
    store.delete(store.index.room.surplus(2.5 + IDLE_S))
    assert store.index.stats().spare_bytes == nbytes
    store.delete(store.index.room.surplus(4.0 + IDLE_S))
    assert store.index.room.used[Tier.MEMORY] == 0
    assert not list((tmp_path / "s").glob("*.dead"))


def test_a_file_is_written_through_its_mapping_once_its_pages_are_allocated(memory: Path) -> None:
    layout = BlockLayout([("weights/0/0", 1, {"w": VALUES, "empty": VALUES[:0], "b": VALUES[:7]})])
    path = memory / "block"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, layout.file_bytes)
    landings = WriteMappingPool()
    # The file is sparse; on a full mount a write would raise SIGBUS.
    assert landings.of(descriptor, layout.file_bytes) is None
    sums = write_block(descriptor, layout)
    written = path.read_bytes()
    os.close(descriptor)

    other = BlockLayout([("weights/0/0", 1, {"w": VALUES + 1, "empty": VALUES[:0], "b": VALUES[:7]})])
    for block in (other, layout):
        locked = lock_named(str(path), os.O_RDWR)
        assert locked is not None
        target = landings.of(locked, block.file_bytes)
        assert target is not None
        again = copy_block(target, block)
        del target
        os.close(locked)
    assert again == sums
    assert path.read_bytes() == written
    landings.close()


def test_other_threads_run_while_a_large_file_is_made_writable(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            assert length is not None
            done.append((start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Watched)
    nbytes = 2 * POPULATE_BYTES + 1234
    path = memory / "block"
    path.write_bytes(bytes(nbytes))
    landings = WriteMappingPool()
    locked = lock_named(str(path), os.O_RDWR)
    assert locked is not None
    for _ in range(2):  # In the second round all pages are allocated.
        assert landings.of(locked, nbytes) is not None
    assert done == [(0, POPULATE_BYTES), (POPULATE_BYTES, POPULATE_BYTES), (2 * POPULATE_BYTES, 1234)]
    os.close(locked)
    landings.close()


def test_a_file_on_a_disk_is_written_without_a_mapping(tmp_path: Path, memory: Path) -> None:
    landings = WriteMappingPool()
    mapped = []
    for folder in (tmp_path, memory):
        (folder / "block").write_bytes(bytes(1 << 16))
        with (folder / "block").open("r+b") as file:
            os.fsync(file.fileno())  # This allocates all blocks.
            mapped.append(landings.of(file.fileno(), 1 << 16) is not None)
    landings.close()
    kinds = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path, memory], text=True).split()
    assert kinds[1] == "tmpfs"
    assert mapped == [kind == "tmpfs" for kind in kinds]


def test_a_kept_mapping_holds_neither_a_lock_nor_the_pages_of_a_deleted_file(memory: Path) -> None:
    store = Store(memory / "s")
    path = store.put("weights/0/0", VALUES)
    landings = WriteMappingPool()
    locked = lock_named(path, os.O_RDWR)
    assert locked is not None
    nbytes = os.fstat(locked).st_size
    target = landings.of(locked, nbytes)
    assert target is not None
    del target
    watch = os.open(path, os.O_RDONLY)
    store.clear("weights/0/0")
    assert store.index.room.used[Tier.MEMORY]  # The producer's own lock still counts, as the lock of a reader would.
    os.close(locked)
    store.reap()
    store.delete(store.index.room.surplus(IDLE_S + 1))
    assert store.index.room.used[Tier.MEMORY] == 0
    assert os.fstat(watch).st_blocks == 0  # The blocks are freed although `landings` maps the file.
    os.close(watch)
    landings.close()


@pytest.fixture
def kept() -> Iterator[ReadMappingPool]:
    """Yield the mapping pool of a reader."""
    with ThreadPoolExecutor(1) as helper:
        yield ReadMappingPool(helper)


def read(path: str, kept: ReadMappingPool) -> np.ndarray:  # type: ignore[type-arg]
    """Return the shard in a file, read as a service reads weights."""
    return BlockMapping(path, TableCache(), kept).arrays([0], None)[0]["w"]


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.ctypes.data)


def test_a_mapping_kept_by_a_reader_shows_the_next_version_in_the_same_pages(
    tmp_path: Path, kept: ReadMappingPool
) -> None:
    store = Store(tmp_path / "s")
    places = set()
    for step in range(4):
        found = read(store.put(f"weights/0/{step}", VALUES * step), kept)
        assert np.array_equal(found, VALUES * step)
        places.add(address(found))
        store.clear(f"weights/0/{step}")
        held = store.index.room.used[Tier.MEMORY]
        assert np.array_equal(found, VALUES * step)  # The file is in use, so it is retired and counted, but not lent.
        del found
        store.reap()
        assert store.index.room.used[Tier.MEMORY] == held  # This spare is not lent.
    assert len(places) == 1


def test_writes_by_a_reader_reach_neither_later_versions_nor_other_arrays(
    tmp_path: Path, kept: ReadMappingPool
) -> None:
    store = Store(tmp_path / "s")
    path = store.put("weights/0/0", VALUES)
    first, second = read(path, kept), read(path, kept)
    first[:] = -1
    assert np.array_equal(second, VALUES)
    first[123] = -1
    del first, second
    store.clear("weights/0/0")
    again = store.put("weights/0/1", VALUES * 2)
    assert np.array_equal(read(again, kept), VALUES * 2)


def test_a_mapping_kept_by_a_reader_holds_neither_a_lock_nor_deleted_pages(
    tmp_path: Path, kept: ReadMappingPool
) -> None:
    store = Store(tmp_path / "s")
    path = store.put("weights/0/0", VALUES)
    watch = os.open(path, os.O_RDONLY)
    found = read(path, kept)
    store.clear("weights/0/0")
    store.delete(store.index.room.surplus(IDLE_S + 1))
    assert np.array_equal(found, VALUES)
    assert store.index.room.used[Tier.MEMORY]
    del found
    store.reap()
    store.delete(store.index.room.surplus(IDLE_S + 1))
    assert store.index.room.used[Tier.MEMORY] == 0
    assert os.fstat(watch).st_blocks == 0
    os.close(watch)
    kept.close()


def test_a_reader_without_free_descriptors_gives_up_its_kept_mappings(tmp_path: Path, kept: ReadMappingPool) -> None:
    store = Store(tmp_path / "s", limit=1 << 22)
    paths = [store.put(f"train/0/{number}", VALUES + number) for number in range(6)]
    for path in paths[:5]:
        read(path, kept)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # This leaves two more descriptors; a kept mapping needs three.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, before[1]))
    try:
        found = read(paths[5], kept)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert np.array_equal(found, VALUES + 5)
