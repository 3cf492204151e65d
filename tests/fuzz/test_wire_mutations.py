"""Tests that damaged messages raise WireError or decode to a valid message, and take up little memory."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proto import codec, envelope, tensors
from proto.errors import WireError
from proto.limits import CONTROL, Limits
from proto.registry import all_messages
from tests.golden.vectors import INDEX, read

GOLDEN = {each["name"]: read(each["name"], each["frames"]) for each in json.loads(INDEX.read_text())}
CASES = 300
PEAK_BYTES = 4 << 20
WIDE = Limits(body_bytes=1 << 20, frames=1024, frame_bytes=1 << 20, total_bytes=1 << 30)
LOOSE = Limits(body_bytes=8 << 20, frames=64, frame_bytes=1 << 20, total_bytes=8 << 20)


def attempt(frames: list[bytes], limits: Limits = LOOSE) -> codec.Decoded | None:
    """Decode the frames. Return None for WireError; any other error fails the test. A decoded message must be encodable
    again."""
    try:
        decoded = codec.decode(frames, limits)
    except WireError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert "\n" not in told
        return None
    codec.encode(decoded.body, request_id=0, incarnation=0, arrays=decoded.tensors, limits=limits)
    return decoded


def reseal(frames: list[bytes]) -> list[bytes]:
    """Return mutated frames under a matching envelope, so that the layers below it are reached."""
    if len(frames) < 2 or len(frames[0]) != envelope.SIZE:
        return frames
    kind, flags = struct.unpack_from("<HH", frames[0], 6)
    has_table = bool(flags & envelope.FLAG_TABLE) and len(frames) > 2
    head = envelope.Envelope(
        type=kind,
        request_id=1,
        incarnation=2,
        flags=envelope.FLAG_TABLE if has_table else 0,
        body_bytes=len(frames[1]),
        frame_count=len(frames) - 2 - has_table,
        table_bytes=len(frames[2]) if has_table else 0,
        total_bytes=sum(map(len, frames[1:])),
    )
    return [head.pack(), *frames[1:]]


def flip(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    data = bytearray(frames[at])
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [*frames[:at], bytes(data), *frames[at + 1 :]]


def overwrite(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    data = bytearray(frames[at])
    begin = rng.randrange(len(data) + 1)
    value = rng.choice(
        [b"\xff" * 8, b"\x00" * 8, b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    )
    data[begin : begin + len(value)] = value
    return [*frames[:at], bytes(data), *frames[at + 1 :]]


def truncate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    return [*frames[:at], frames[at][: rng.randrange(len(frames[at]) + 1)], *frames[at + 1 :]]


def extend(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    return [*frames[:at], frames[at] + rng.randbytes(rng.randint(1, 100)), *frames[at + 1 :]]


def drop(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    return [*frames[:at], *frames[at + 1 :]]


def duplicate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(frames))
    return [*frames[: at + 1], *frames[at:]]


def reorder(frames: list[bytes], rng: random.Random) -> list[bytes]:
    return rng.sample(frames, len(frames))


def splice(frames: list[bytes], rng: random.Random) -> list[bytes]:
    other = rng.choice(list(GOLDEN.values()))
    return [*frames[: rng.randrange(len(frames) + 1)], *other[rng.randrange(len(other) + 1) :]]


MUTATIONS = [flip, overwrite, truncate, extend, drop, duplicate, reorder, splice]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_mutated_vector_is_refused_or_valid(name: str, mutate: Callable[..., list[bytes]]) -> None:
    rng = random.Random(f"{name} {mutate.__name__}")
    tracemalloc.start()
    try:
        for case in range(CASES):
            frames = mutate(GOLDEN[name], rng)
            if case % 3 == 0:
                frames = mutate(frames, rng) if frames else frames
            attempt(frames if case % 2 else reseal(frames))
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_every_flipped_bit_of_the_header_is_detected(name: str) -> None:
    head, *rest = GOLDEN[name]
    for bit in range(8 * envelope.SIZE):
        damaged = bytearray(head)
        damaged[bit // 8] ^= 1 << bit % 8
        assert attempt([bytes(damaged), *rest]) is None


def test_every_flipped_bit_of_a_tensor_is_detected() -> None:
    frames = GOLDEN["tensors_shapes"]
    for at in range(3, len(frames)):
        for bit in range(8 * len(frames[at])):
            damaged = bytearray(frames[at])
            damaged[bit // 8] ^= 1 << bit % 8
            assert attempt([*frames[:at], bytes(damaged), *frames[at + 1 :]]) is None


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_dropped_duplicated_or_swapped_frames_are_refused(name: str) -> None:
    frames = GOLDEN[name]
    for at in range(len(frames)):
        assert attempt([*frames[:at], *frames[at + 1 :]]) is None
        assert attempt([*frames[: at + 1], *frames[at:]]) is None
        for other in range(at):
            swapped = list(frames)
            swapped[at], swapped[other] = swapped[other], swapped[at]
            if swapped != frames:
                assert attempt(swapped) is None


@settings(max_examples=300)
@given(frames=st.lists(st.binary(max_size=200), max_size=6))
@example(frames=[])
@example(frames=[b""] * 1000)
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    assert attempt(frames) is None


@settings(max_examples=300)
@given(number=st.sampled_from(sorted(all_messages())), data=st.binary(max_size=300))
def test_random_bodies_of_every_type_are_refused_or_valid(number: int, data: bytes) -> None:
    head = envelope.Envelope(type=number, request_id=1, incarnation=2, body_bytes=len(data), total_bytes=len(data))
    attempt([head.pack(), data])


@settings(max_examples=300)
@given(table=st.binary(max_size=96 * 4), frames=st.lists(st.binary(max_size=64), max_size=4))
def test_random_tables_are_refused_or_valid(table: bytes, frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert all(array.nbytes <= 64 * 4 for array in tensors.decode(table, frames, WIDE))


U64 = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1]))


@settings(max_examples=500)
@given(
    code=st.integers(0, 20),
    ndim=st.integers(0, 9),
    dims=st.lists(U64, min_size=8, max_size=8),
    nbytes=U64,
    first=st.integers(0, 2),
    used=st.integers(0, 2),
    data=st.binary(max_size=32),
)
def test_plausible_rows_are_refused_or_valid(
    code: int, ndim: int, dims: list[int], nbytes: int, first: int, used: int, data: bytes
) -> None:
    dims = dims[:ndim] + [0] * (8 - len(dims[:ndim]))
    row = struct.pack("<BBHIIIQQ8Q", code, ndim, 0, first, used, 0, nbytes, xxhash.xxh3_64_intdigest(data), *dims)
    try:
        [array] = tensors.decode(row, [data] if used else [], WIDE)
    except WireError:
        return
    assert array.nbytes == nbytes


@settings(max_examples=300)
@given(
    extra=st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["|O", "O", "<f4", "|S4", "<U4", ">f4", "<M8[s]", "V8", "<c8", [["a", "<f4"]], 3, None]
            ),
            "kind": st.sampled_from(["O", b"O", "V", b"V", "", b"", None, 1]),
            "shape": st.lists(st.one_of(U64, st.integers(-4, 4), st.floats(), st.booleans()), max_size=10),
            "nd": st.sampled_from([True, False, 1, None]),
            "data": st.one_of(st.binary(max_size=64), st.text(max_size=5), st.none()),
            "complex": st.just(True),
        },
    )
)
def test_plausible_inline_maps_are_refused_or_valid(extra: dict[str, Any]) -> None:
    value: dict[bytes, Any] = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": b"\0" * 8}
    value.update({key.encode(): each for key, each in extra.items()})
    try:
        array = codec.from_map(value)
    except WireError:
        return
    assert not array.dtype.hasobject
    assert array.nbytes == len(value[b"data"])
    assert isinstance(array, np.ndarray)


def test_memory_of_decoding_is_bounded_by_the_bytes_that_arrived() -> None:
    """Announced sizes take up no memory; only bytes that have arrived do."""
    announced = [
        (44, b"\x81\xa7metrics\xdf\xff\xff\xff\xff"),
        (67, b"\x81\xa5tasks\xdd\x7f\xff\xff\xff"),
        (85, b"\x81\xaaadvantages\xdd\x7f\xff\xff\xff"),
        (60, b"\x81\xa4path\xdb\xff\xff\xff\xff"),
        (85, b"\x81\xaaadvantages\xc6\xff\xff\xff\xff"),
        (4, b"\x81\xa1x\xdd\x80\x00\x00\x00"),
        (4, b"\x81\xa1x" + b"\x91" * 1_000_000 + b"\x90"),
        (4, b"\x81\xa1x" + b"\x81\x01" * 1_000_000 + b"\x90"),
        (85, b"\x81\xaaadvantages" + b"\x91" * 1_000_000 + b"\x90"),
    ]
    for kind, data in announced:
        head = envelope.Envelope(type=kind, request_id=1, incarnation=2, body_bytes=len(data), total_bytes=len(data))
        frames = [head.pack(), data]
        tracemalloc.start()
        try:
            assert attempt(frames, CONTROL) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
