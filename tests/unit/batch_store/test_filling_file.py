"""Tests a file that is filled from a stream: its verification, the parts that can be read, and how it continues after
an interruption.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from proto.blockfile import BlockLayout
from proto.errors import WireError
from services.batch_store.relay import CHUNK_BYTES, FillingFile
from shared.dataplane.write import write_block

ROWS = {"a": np.arange(CHUNK_BYTES // 2, dtype=np.int32), "b": np.arange(CHUNK_BYTES // 4 + 50, dtype=np.int32)}


@pytest.fixture
def stream(tmp_path: Path) -> bytes:
    """Return the bytes of a version made up of four chunks, the last of which is short."""
    file = os.open(tmp_path / "whole", os.O_CREAT | os.O_RDWR)
    write_block(file, BlockLayout([("weights/0/1", 1, ROWS)]))
    os.close(file)
    data = (tmp_path / "whole").read_bytes()
    assert 3 * CHUNK_BYTES < len(data) < 4 * CHUNK_BYTES
    return data


@pytest.fixture
def progress() -> list[int]:
    return []


@pytest.fixture
def file(tmp_path: Path, stream: bytes, progress: list[int]) -> FillingFile:
    (tmp_path / "part").write_bytes(b"")
    os.truncate(tmp_path / "part", len(stream))
    made = FillingFile(str(tmp_path / "part"), len(stream), lambda: progress.append(made.available_bytes))
    made.add_digests(
        [xxhash.xxh3_64_intdigest(stream[at : at + CHUNK_BYTES]) for at in range(0, len(stream), CHUNK_BYTES)]
    )
    return made


def receive(file: FillingFile, data: bytes) -> None:
    file.room(len(data))[:] = data
    file.received += len(data)


def test_only_whole_verified_chunks_and_their_head_are_available(
    file: FillingFile, stream: bytes, progress: list[int]
) -> None:
    receive(file, stream[: CHUNK_BYTES - 1])
    file.check(file.received)
    assert (file.available_bytes, file.head_bytes, progress) == (0, 0, [])
    receive(file, stream[CHUNK_BYTES - 1 : 2 * CHUNK_BYTES])
    file.check(file.received)
    assert progress == [2 * CHUNK_BYTES]
    assert file.head_checksum == xxhash.xxh3_64_intdigest(stream[: file.head_bytes])
    assert bytes(file.pieces(100, CHUNK_BYTES)[0]) == stream[100 : 100 + CHUNK_BYTES]
    receive(file, stream[2 * CHUNK_BYTES :])
    file.check(file.received)
    assert file.available_bytes == len(stream)


def test_a_damaged_chunk_stays_unavailable_and_is_received_again(file: FillingFile, stream: bytes) -> None:
    bad = bytearray(stream)
    bad[2 * CHUNK_BYTES + 7] ^= 1
    receive(file, bytes(bad))
    with pytest.raises(WireError, match=f"bytes {2 * CHUNK_BYTES} to {3 * CHUNK_BYTES} do not match the digest"):
        file.check(file.received)
    assert file.available_bytes == 2 * CHUNK_BYTES
    file.resume()
    assert file.received == 2 * CHUNK_BYTES
    receive(file, stream[2 * CHUNK_BYTES :])
    file.check(file.received)
    assert bytes(file.pieces(0, len(stream))[0]) == stream


def test_readers_of_an_abandoned_file_are_notified(file: FillingFile, stream: bytes, progress: list[int]) -> None:
    receive(file, stream[:CHUNK_BYTES])
    file.check(file.received)
    file.close(complete=False)
    assert progress == [CHUNK_BYTES, -1]


def test_a_file_continues_after_the_chunks_that_an_earlier_attempt_received(file: FillingFile, stream: bytes) -> None:
    receive(file, stream[: 2 * CHUNK_BYTES + 5])
    file.adopt()
    assert file.available_bytes == 2 * CHUNK_BYTES
    file.resume()
    receive(file, stream[2 * CHUNK_BYTES :])
    file.check(file.received)
    assert bytes(file.pieces(0, len(stream))[0]) == stream
