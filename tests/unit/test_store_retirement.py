"""Files that must go while no descriptor is left: none is lost, and their bytes count until they are gone."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from proto.blockfile import Layout
from proto.messages import PutTask
from services.batch_store.files import StoreFiles
from services.batch_store.retirement import AT_ONCE, Retirement
from services.batch_store.state import StoreState
from shared.dataplane.write import write_block


def put(index: StoreState, files: StoreFiles, task_id: str, nbytes: int = 32) -> str:
    put_id = f"{hash(task_id) & (1 << 64) - 1:032x}"
    layout = Layout([(task_id, 1, {"a": np.zeros(nbytes, np.uint8)})])
    index.begin(put_id, layout.file_bytes, [PutTask(task_id, 1)], 0.0)
    descriptor = os.open(files.create(put_id, layout.file_bytes), os.O_RDWR)
    write_block(descriptor, layout)
    os.close(descriptor)
    index.seal(put_id, files.read_table(f"{put_id}.tmp"))
    files.seal(put_id)
    return put_id


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """No more than `count` can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 50 + count, hard))
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_finds_no_descriptor_stays_due_and_goes_later(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 24, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement(index, files, lambda: 0.0)
    names = [f"train/0/{i}" for i in range(AT_ONCE + 10)]
    put_ids = [put(index, files, name) for name in names]
    with descriptors_left(0):
        ended.take(index.clear(PutTask(name, 1) for name in names))
        assert ended.is_due(f"{put_ids[0]}.blk")
        ended.settle()
        assert index.stats().zombie_bytes == index.stats().bytes == 4096 * len(names)
    with descriptors_left(3):  # one at a time will do
        ended.settle()
    assert index.stats().bytes == 0
    assert not ended.is_due(f"{put_ids[0]}.blk")
    assert not [entry for entry in os.listdir(tmp_path / "store") if entry.endswith((".blk", ".dead"))]
    files.close()


def test_spares_that_find_no_descriptor_are_deleted_later(tmp_path: Path) -> None:
    index = StoreState("store", 1 << 28, 1)
    files = StoreFiles("store", tmp_path / "store")
    ended = Retirement(index, files, lambda: 0.0)
    names = [f"train/0/{i}" for i in range(20)]
    for name in names:
        put(index, files, name, 1 << 18)
    ended.take(index.clear(PutTask(name, 1) for name in names))
    held = index.stats().spare_bytes
    assert held == index.stats().bytes > 20 * (1 << 18)
    with descriptors_left(0):
        ended.free(index.give_up_spares())
        assert (index.stats().zombie_bytes, index.stats().spare_bytes) == (held, 0)
    with descriptors_left(3):
        ended.settle()
    assert index.stats().bytes == 0
    assert not [entry for entry in os.listdir(tmp_path / "store") if entry.endswith(".dead")]
    files.close()
