"""Files from which streams are read are checked, mapped once and dropped in time."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from proto.blockfile import BlockLayout
from proto.errors import WireError
from proto.messages import PutTask
from services.batch_store.files import StoreFiles
from services.batch_store.room import Removal
from services.batch_store.stream_source import SealedFile, StreamSource, pin
from shared.dataplane import mapping
from shared.dataplane.mapping import MappingCache
from shared.dataplane.write import copy_block, write_block
from tests.unit.shared.stream_rig import SIZE, table_of


def test_a_truncated_file_is_refused(tmp_path: Path, source: StreamSource) -> None:
    kept = SealedFile(str(tmp_path / "file"), table_of(tmp_path / "file"))
    os.truncate(tmp_path / "file", SIZE // 2)
    with pytest.raises(WireError, match=f"s: {kept.path} has {SIZE // 2} bytes; it was sealed with"):
        pin("s", [kept], [[0]], [PutTask("train/0/0", 1)], [], 1 << 40, MappingCache())


def test_kept_mapping_is_dropped_with_its_file_but_not_before_its_streams_end(tmp_path: Path) -> None:
    cache = MappingCache()
    files = StoreFiles("store", tmp_path, on_retire=cache.drop)
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
    descriptor = os.open(files.create("p", layout.file_bytes), os.O_RDWR)
    write_block(descriptor, layout)
    os.close(descriptor)
    files.seal("p")
    stream = cache.get(files.path("p.blk"))
    assert cache.get(files.path("p.blk")) is stream
    files.retire(Removal("p.blk", "p.zombie"))
    assert files.unmapped() == []  # The stream is still sending the file.
    with pytest.raises(FileNotFoundError):
        cache.get(files.path("p.blk"))
    del stream
    assert files.unmapped() == ["p.zombie"]
    files.close()


def test_number_of_kept_tables_is_limited_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "CACHED_ROWS", 1000)
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
    file = np.zeros(layout.file_bytes, np.uint8)
    copy_block(file, layout)
    cache = mapping.TableCache()
    for number in range(100):
        cache.get(f"{number}.blk", file)
    assert len(cache) == 1000 // (mapping.TABLE_ROWS + 1)


def test_tables_of_collected_files_are_not_kept(tmp_path: Path) -> None:
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(10)})])
    data = np.zeros(layout.file_bytes, np.uint8)
    copy_block(data, layout)
    cache = mapping.TableCache()
    live = [tmp_path / f"live-{number}.blk" for number in range(mapping.SWEPT_TABLES // 2)]
    for path in live:
        path.touch()
        cache.get(str(path), data)
    known = cache.get(str(live[0]), data)
    for number in range(10 * mapping.SWEPT_TABLES):
        cache.get(str(tmp_path / f"collected-{number}.blk"), data)
    assert len(cache) <= mapping.SWEPT_TABLES
    assert cache.get(str(live[0]), data) is known


def test_file_retired_while_it_was_being_mapped_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    layout = BlockLayout([("train/0/0", 1, {"a": np.arange(1000)})])
    with path.open("w+b") as file:
        file.truncate(layout.file_bytes)
        write_block(file.fileno(), layout)
    cache = MappingCache()
    made = mapping._map_named

    def retired_meanwhile(path: str) -> mmap.mmap:
        mapped = made(path)
        os.rename(path, f"{path}.zombie")
        cache.drop(path)
        return mapped

    monkeypatch.setattr(mapping, "_map_named", retired_meanwhile)
    with pytest.raises(FileNotFoundError):
        cache.get(str(path))
    with (tmp_path / "file.zombie").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # No lock is left.
