"""Tests that when no descriptor is free or the file system refuses a rename, no file is leaked, and the bytes of each
file count until the file is deleted.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from proto.blockfile import BlockLayout
from proto.messages import PutTask
from services.batch_store import retirement
from services.batch_store.files import StoreFiles
from services.batch_store.retirement import AT_ONCE, Retirement
from services.batch_store.room import Tier, held_bytes
from services.batch_store.spill import Spiller
from services.batch_store.state import StoreState
from services.batch_store.stream_source import STREAM_SHARE, SealedFile, pin
from shared.dataplane.mapping import MappingCache, lock_named
from shared.dataplane.write import write_block
from shared.os_limits import raise_descriptor_limit
from tests.descriptors import descriptors_left


def put(index: StoreState, files: StoreFiles, task_id: str, nbytes: int = 32) -> str:
    put_id = f"{hash(task_id) & (1 << 64) - 1:032x}"
    layout = BlockLayout([(task_id, 1, {"a": np.zeros(nbytes, np.uint8)})])
    index.begin(put_id, layout.file_bytes, [PutTask(task_id, 1)], 0.0)
    descriptor = os.open(files.create(put_id, layout.file_bytes), os.O_RDWR)
    write_block(descriptor, layout)
    os.close(descriptor)
    files.seal(put_id)
    index.seal(put_id, files.read_table(f"{put_id}.blk"))
    return put_id


def test_files_remain_due_for_deletion_while_no_descriptor_is_free_and_are_deleted_later(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    names = [f"train/0/{i}" for i in range(AT_ONCE + 10)]
    put_ids = [put(index, files, name) for name in names]
    with descriptors_left(0):
        ended.take(index.clear(PutTask(name, 1) for name in names))
        assert ended.is_due(f"{put_ids[0]}.blk")
        ended.settle()
        assert index.stats().zombie_bytes == index.stats().bytes == 4096 * len(names)
    with descriptors_left(3):  # Three descriptors suffice to delete one file at a time.
        ended.settle()
    assert index.stats().bytes == 0
    assert not ended.is_due(f"{put_ids[0]}.blk")
    assert not [entry for entry in os.listdir(tmp_path / "store") if entry.endswith((".blk", ".dead"))]
    files.close()


def test_spares_are_deleted_later_if_no_descriptor_is_free(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 28, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    names = [f"train/0/{i}" for i in range(20)]
    for name in names:
        put(index, files, name, 1 << 18)
    ended.take(index.clear(PutTask(name, 1) for name in names))
    held = index.stats().spare_bytes
    assert held == index.stats().bytes > 20 * (1 << 18)
    with descriptors_left(0):
        ended.free(index.room.give_up_spares())
        assert (index.stats().zombie_bytes, index.stats().spare_bytes) == (held, 0)
    with descriptors_left(3):
        ended.settle()
    assert index.stats().bytes == 0
    assert not [entry for entry in os.listdir(tmp_path / "store") if entry.endswith(".dead")]
    files.close()


def test_a_file_with_a_mapping_kept_for_streams_is_deleted_without_another_descriptor(tmp_path: Path) -> None:
    index, cache = StoreState("store", 1 << 24, 1), MappingCache()
    files = StoreFiles("store", tmp_path / "store", on_retire=cache.drop)
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put_id = put(index, files, "train/0/0")
    cache.get(files.path(f"{put_id}.blk"))
    with descriptors_left(0):
        ended.take(index.clear([PutTask("train/0/0", 1)]))
    assert index.stats().bytes == 0
    files.close()


def test_a_producer_counts_as_alive_while_no_descriptor_is_free_to_check_it(tmp_path: Path) -> None:
    files = StoreFiles("store", tmp_path / "store")
    files.create("p", 100)
    with descriptors_left(0):
        assert files.in_use("p")
    assert not files.in_use("p")
    os.unlink(files.path("p.tmp"))
    assert not files.in_use("p")
    files.close()


def test_mapped_zombies_use_only_their_share_of_descriptors_and_do_not_delay_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "ZOMBIE_SHARE", raise_descriptor_limit() // 3)  # The share is three descriptors.
    monkeypatch.setattr(retirement, "AT_ONCE", 2)
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put_ids = [put(index, files, f"train/0/{i}") for i in range(12)]
    readers = [lock_named(files.path(f"{put_id}.blk"), os.O_RDONLY) for put_id in put_ids]
    before = descriptors()
    ended.take(index.clear(PutTask(f"train/0/{i}", 1) for i in range(12)))
    for _ in range(12):
        ended.settle()
        assert descriptors() <= before + 3
    # All files were renamed, so no lookup finds them.
    assert not any(ended.is_due(f"{put_id}.blk") for put_id in put_ids)
    left = 12
    for number in (11, 5, 0, 6):
        reader = readers[number]
        assert reader is not None
        os.close(reader)
        for _ in range(6):
            ended.settle()
        left -= 1
        assert index.stats().zombie_bytes == index.stats().bytes == left * 4096
    for reader in readers[1:5] + readers[7:11]:
        assert reader is not None
        os.close(reader)
    ended.settle()
    assert index.stats().bytes == 0
    files.close()


def test_mappings_of_streams_use_only_their_share_of_descriptors(tmp_path: Path) -> None:
    index, cache = StoreState("store", 1 << 24, 1), MappingCache()
    files = StoreFiles("store", tmp_path / "store")
    put_ids = [put(index, files, f"train/0/{i}") for i in range(9)]
    tasks = [PutTask(f"train/0/{i}", 1) for i in range(9)]
    kept = [SealedFile(files.path(f"{put_id}.blk"), index.sealed(put_id).table) for put_id in put_ids]
    cache.most_files = 4 * STREAM_SHARE
    first = pin("store", kept, [[at] for at in range(9)], tasks, (), 1 << 30, cache)
    assert first.covered == 4
    cache.most_files = 6
    for at in (4, 5, 6):
        cache.get(kept[at].path)  # An entry that no stream is sending is evicted.
    cache.most_files = 4
    with pytest.raises(OSError, match="mapped for streams") as caught:
        cache.get(kept[7].path)
    assert caught.value.errno == errno.EMFILE
    del first
    cache.get(kept[7].path)
    files.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_cannot_be_renamed_remains_due_for_deletion_and_does_not_delay_others(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put_ids = [put(index, files, f"train/0/{i}") for i in range(3)]
    effects = index.clear([PutTask(f"train/0/{i}", 1) for i in range(3)])
    in_the_way = Path(files.path(effects[0].target))
    in_the_way.mkdir()
    before = descriptors()
    ended.take(effects)
    ended.settle()
    assert descriptors() == before
    assert ended.is_due(f"{put_ids[0]}.blk")
    assert index.stats().zombie_bytes == index.stats().bytes == 4096
    in_the_way.rmdir()
    ended.settle()
    assert index.stats().bytes == 0
    files.close()


def test_a_zombie_that_cannot_be_deleted_counts_until_its_deletion_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put(index, files, "train/0/0")

    def refuse(path: Path, *, missing_ok: bool) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        ended.take(index.clear([PutTask("train/0/0", 1)]))
        assert index.stats().zombie_bytes == 4096
    ended.settle()
    assert index.stats().bytes == 0
    files.close()


def test_a_file_deleted_by_another_process_is_released(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put_ids = [put(index, files, f"train/0/{i}") for i in range(2)]
    os.unlink(files.path(f"{put_ids[0]}.blk"))
    ended.take(index.clear([PutTask(f"train/0/{i}", 1) for i in range(2)]))
    assert index.stats().bytes == 0
    files.close()


def test_a_spare_that_cannot_become_the_file_of_a_put_is_deleted_and_its_bytes_are_freed(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put(index, files, "train/0/0", 1 << 18)
    ended.take(index.clear([PutTask("train/0/0", 1)]))
    before = descriptors()
    put_id = "f" * 32
    spare = index.spare(put_id, 1 << 18)
    assert spare is not None
    assert files.claim(spare)
    assert index.begin(put_id, 1 << 18, [PutTask("train/0/1", 1)], 0.0, spare)
    Path(files.path(f"{put_id}.tmp")).mkdir()
    with pytest.raises(IsADirectoryError):
        files.reuse(spare, put_id, 1 << 18)
    index.forget(put_id)
    assert descriptors() == before
    assert index.stats().bytes == 0
    assert not [entry for entry in os.listdir(tmp_path / "store") if entry.endswith(".dead")]
    files.close()


def test_a_copy_on_disk_that_cannot_be_renamed_takes_up_no_space_and_is_tried_again(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 20, 1, 1 << 20)
    files = StoreFiles("store", tmp_path / "store", tmp_path / "disk")
    ended = Retirement("store", index.room, files, lambda: 0.0)
    put_id = put(index, files, "train/0/0", 1 << 19)
    in_the_way = tmp_path / "disk" / f"{put_id}.blk"
    in_the_way.mkdir()

    async def make_room() -> None:
        deadline = asyncio.get_running_loop().time() + 10
        await Spiller("store", index, files, ended).make_room("f" * 32, 1 << 19, deadline)

    asyncio.run(make_room())
    assert [index.room.used[place] for place in Tier] == [held_bytes((1 << 19) + 1), 0]
    assert os.listdir(tmp_path / "disk") == [in_the_way.name]
    in_the_way.rmdir()
    asyncio.run(make_room())
    assert [index.room.used[place] for place in Tier] == [0, held_bytes((1 << 19) + 1)]
    files.close()
