"""Tests that damaged files, bulk messages and streams raise WireError or yield consistent values, and take up little
memory.

The checksums of damaged data are made valid again, because otherwise only the checksums would be tested.
"""

from __future__ import annotations

import contextlib
import random
import re
import tracemalloc
from collections.abc import Callable

import pytest

from proto.errors import WireError
from proto.messages import StreamOpened
from shared.dataplane.reused_pages import Regions
from shared.dataplane.stream_arrival import Arrival
from tests.fuzz import stream_inputs
from tests.fuzz.stream_inputs import TASKS

CASES = 1500
PEAK_BYTES = 8 << 20
KEYS = 16


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, replace numbers, or remove or insert bytes."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(made))
        way = rng.randrange(6)
        if way < 3:
            made[at] ^= 1 << rng.randrange(8)
        elif way < 4:
            value = rng.choice([b"\xff" * 4, b"\0" * 8, b"\1\0\0\0", b"\xff" * 8, b"\0\0\0\x80", b"\n", b"\x40\0\0\0"])
            made[at : at + len(value)] = value
        elif way < 5:
            del made[at : at + rng.choice([1, 4, 8, 32])]
        else:
            made[at:at] = rng.randbytes(rng.choice([1, 4, 8, 32]))
    return bytes(made) or b"\0"


def read_file(data: bytes) -> None:
    stream_inputs.read_file(stream_inputs.sealed_file(data))


def read_bulk(data: bytes) -> None:
    stream_inputs.read_bulk(stream_inputs.sealed_bulk(data))


@pytest.mark.parametrize(
    ("read", "whole", "reasons"),
    [
        pytest.param(read_file, stream_inputs.whole_file(1)[0], 12, id="file"),
        pytest.param(read_file, stream_inputs.whole_file(2)[0], 12, id="file of two tasks"),
        pytest.param(read_bulk, stream_inputs.bulk_seed(), 4, id="bulk"),
        pytest.param(stream_inputs.receive, stream_inputs.arrival_seed(1 | 2 | 4, 1), 8, id="stream"),
        pytest.param(stream_inputs.receive, stream_inputs.arrival_seed(1 | 2 | 4 | 8 | KEYS, 2), 8, id="two tasks"),
    ],
)
def test_damaged_data_is_refused_or_consistent(read: Callable[[bytes], None], whole: bytes, reasons: int) -> None:
    rng = random.Random(7)
    read(whole)
    told: set[str] = set()
    taken = 0
    tracemalloc.start()
    try:
        for _ in range(CASES):
            try:
                read(damaged(whole, rng))
            except WireError as error:
                told.add(re.sub(r"[0-9]+|b?'.*'", "", str(error)))
            else:
                taken += 1
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert not any("\n" in text for text in told)
    assert len(told) >= reasons, told  # The checks after the checksums were reached.
    assert taken > 0


@pytest.mark.parametrize("total_bytes", [1 << 20, 1 << 38, 1 << 46])
def test_an_announced_size_takes_up_no_memory(total_bytes: int) -> None:
    """A task may have any size, so an announced size alone is not refused."""
    opened = StreamOpened(stream=1, covered=1, total_bytes=total_bytes, head_bytes=100, head_checksum=0)
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):  # This is more than the machine can map.
            Arrival(opened, TASKS[:1], [], 1 << 20, Regions())
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
