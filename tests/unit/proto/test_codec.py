"""Tests the messages that the codec refuses, with one case for each reason, and the encodings that a second
implementation must know."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgpack_numpy
import msgspec
import numpy as np
import pytest
import xxhash

from proto import codec, dtypes, envelope, tensors
from proto.errors import WireError
from proto.ids import check_key, check_task_id, make_task_id, new_incarnation, split_task_id
from proto.limits import CONTROL, MAX_INLINE_BYTES, Limits
from proto.messages import Ack, ErrorCode, ForwardBackward, GetInventory, Inventory, Ping, PutTask, RestartService
from proto.registry import Message, all_messages, message

HEAD = struct.Struct("<4sBBHHHIQQIIIIQ")
ROW = struct.Struct("<BBHIIIQQ8Q")
NOTHING = xxhash.xxh3_64_intdigest(b"")


def header(**fields: Any) -> bytes:
    values = {
        "magic": b"RLBS", "major": 1, "minor": envelope.MINOR, "type": Ack.TYPE, "flags": 0, "reserved": 0,
        "remaining": 0, "request": 1, "incarnation": 2, "body": 1, "frames": 0, "table": 0, "reserved2": 0, "total": 1,
        **fields,
    }  # fmt: skip
    head = HEAD.pack(*values.values())
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def row(
    code: int = 2, ndim: int = 1, first: int = 0, used: int = 1, dims: tuple[int, ...] = (3,), **more: int
) -> bytes:
    values = {"flags": 0, "reserved": 0, "nbytes": 3, "checksum": xxhash.xxh3_64_intdigest(b"abc"), **more}
    padded = (*dims, *[0] * (8 - len(dims)))
    return ROW.pack(
        code, ndim, values["flags"], first, used, values["reserved"], values["nbytes"], values["checksum"], *padded
    )


def refuse(frames: list[Any], match: str, limits: Limits = CONTROL) -> None:
    with pytest.raises(WireError, match=match) as error:
        codec.decode(frames, limits)
    assert "\n" not in str(error.value)


def test_well_formed_header_built_by_hand_is_accepted() -> None:
    assert codec.decode([header(), b"\x80"]).body == Ack()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"magic": b"HTTP"}, "magic b'HTTP'"),
        ({"major": 2, "minor": 7}, rf"protocol version 2\.7: this side speaks 1\.{envelope.MINOR};"),
        ({"flags": 8}, "flags 0x8"),
        ({"reserved": 1}, "flags"),
        ({"reserved2": 1}, "flags"),
        ({"body": CONTROL.body_bytes + 1, "total": CONTROL.body_bytes + 1}, "body of 8388609 bytes: limit is 8388608"),
        ({"frames": 65}, "65 frames: limit is 64"),
        ({"frames": 2**32 - 1}, "4294967295 frames: limit"),
        ({"total": 2**64 - 1}, "total of 18446744073709551615 bytes"),
        ({"total": 0}, "must fit"),
        ({"table": 96}, "must fit"),
        ({"body": 2, "total": 2}, "body 1, table 0, frames 0: the envelope says 2, 0, 0"),
        ({"total": 2}, "1 bytes: the envelope says 2"),
        ({"frames": 1}, "frames 0: the envelope says"),
        ({"flags": envelope.FLAG_TABLE}, "no frame for it"),
        ({"type": 0}, "message type 0: unknown"),
        ({"type": 65535}, "message type 65535: unknown"),
    ],
)
def test_malformed_header_is_refused(fields: dict[str, Any], match: str) -> None:
    refuse([header(**fields), b"\x80"], match)


def test_newer_major_version_is_reported_even_with_another_kind_of_checksum() -> None:
    refuse([header(major=2)[:-8] + bytes(8), b"\x80"], rf"protocol version 2\.{envelope.MINOR}")
    refuse([header()[:-8] + bytes(8), b"\x80"], "checksum")


def test_newer_minor_version_may_set_unknown_flags_and_fields() -> None:
    newer = envelope.MINOR + 1
    decoded = codec.decode([header(minor=newer, flags=0x4000, reserved=9, reserved2=9), b"\x80"])
    assert decoded.envelope.minor == newer
    body = msgpack.packb({"cursor": 4, "hint": {"a": [1, b"x", None]}})
    decoded = codec.decode([header(minor=newer, type=GetInventory.TYPE, body=len(body), total=len(body)), body])
    assert decoded.body == GetInventory(cursor=4)
    longer = msgpack.packb({"tasks": [["train/0/0", 1, "new", 2.5]], "cursor": 0})
    decoded = codec.decode([header(minor=newer, type=Inventory.TYPE, body=len(longer), total=len(longer)), longer])
    assert decoded.body == Inventory(tasks=[PutTask("train/0/0", 1)], cursor=0)


@pytest.mark.parametrize("count", [0, 1, 3, 200_000])
def test_wrong_number_of_empty_frames_is_refused(count: int) -> None:
    refuse([b""] * count, "frames: must have an envelope and a body|envelope of 0 bytes")


def test_extra_and_missing_frames_are_refused() -> None:
    frames = [
        bytes(frame) for frame in codec.encode(Ack(), request_id=1, incarnation=2, arrays=[np.zeros(3), np.ones(2)])
    ]
    assert len(frames) == 5
    refuse([*frames, b""], "frames 3")
    refuse([*frames, *[b""] * 200_000], "frames 200002")
    refuse(frames[:-1], "frames 1")
    refuse(frames[:2], "no frame for it")
    refuse(frames[:1], "1 frames")


@pytest.mark.parametrize(
    ("table", "frames", "match"),
    [
        (row(code=0), 1, "dtype code 0"),
        (row(code=19), 1, "dtype code 19"),
        (row(code=255), 1, "dtype code 255"),
        (row(ndim=9), 1, "ndim 9"),
        (row(ndim=255), 1, "ndim 255"),
        (row(flags=1), 1, "flags 1"),
        (row(reserved=1), 1, "flags 0"),
        (row(dims=(3, 1)), 1, "past ndim 1 must be zero"),
        (row(dims=(4,)), 1, r"shape \[4\] of uint8 is not 3 bytes"),
        (row(code=12, dims=(2**62,), nbytes=0), 1, "limit is"),
        (row(ndim=2, dims=(2**32, 2**32), nbytes=0, used=0, checksum=NOTHING), 0, "limit is"),
        (row(ndim=2, dims=(2**63, 2), nbytes=0, used=0, checksum=NOTHING), 0, "limit is"),
        (row(ndim=2, dims=(0, 2**63), nbytes=0, used=0, checksum=NOTHING), 0, "limit is"),
        (row(ndim=8, dims=(0, *[2**64 - 1] * 7), nbytes=0, used=0, checksum=NOTHING), 0, "limit is"),
        (row(dims=(2**64 - 3,), nbytes=2**64 - 3), 1, "limit is"),
        (row(first=1), 1, r"frames 1\+1 of 1"),
        (row(used=2), 1, r"frames 0\+2 of 1"),
        (row(used=2**32 - 1), 1, "frames 0"),
        (row(used=0), 1, "frames 0"),
        (row(dims=(0,), nbytes=0), 1, "frames 0"),
        (row(), 2, "every frame must be used once"),
        (row() + row(first=0), 1, "frames 0"),
        (row()[:-1], 1, "multiple of 96"),
        (row() * 65, 1, "65 rows: limit is 64"),
        (row(checksum=1), 1, "checksum does not match"),
        (b"", 1, "every frame must be used once"),
    ],
)
def test_malformed_tensor_table_is_refused(table: bytes, frames: int, match: str) -> None:
    with pytest.raises(WireError, match=match):
        tensors.decode(table, [b"abc"] * frames, CONTROL)


def test_frames_of_a_tensor_hold_exactly_its_bytes_and_none_is_empty() -> None:
    two = row(used=2)
    assert tensors.decode(two, [b"a", b"bc"], CONTROL)[0].tolist() == [97, 98, 99]
    for parts in ([b"abc", b""], [b"", b"abc"], [b"ab", b"cd"], [b"a", b"b"]):
        with pytest.raises(WireError, match="frames hold"):
            tensors.decode(two, parts, CONTROL)


def test_oversize_is_refused_at_the_sender() -> None:
    cases: list[tuple[Message, list[Any], str]] = [
        (RestartService(service="x" * (CONTROL.body_bytes + 1)), [], "limits are 8388608 for the body"),
        (Ack(), [np.zeros(CONTROL.tensor_bytes + 1, np.uint8)], "limit is 65536 bytes; send larger tensors as shards"),
        (Ack(), [np.zeros(1, np.uint8)] * 65, "65 tensors"),
        (Ack(), [np.zeros(0, np.uint8)] * 65, "65 tensors"),
        (Ack(), [np.zeros((1,) * 9)], "9 dimensions: limit is 8"),
        (Ack(), [np.empty((0, 2**40))], "limit is"),
        (Ack(), [np.array([object()])], "dtype object: cannot be sent"),
        (Ack(), [np.array(["x"])], "cannot be sent"),
        (Ack(), [np.zeros(1, np.complex64)], "cannot be sent"),
        (Ack(), [np.zeros(1, [("a", "<f4")])], "cannot be sent"),
        (Ack(), [np.zeros(1, "<M8[s]")], "cannot be sent"),
        (Ack(), [np.zeros(1, np.longdouble)], "cannot be sent"),
    ]
    for body, arrays, match in cases:
        with pytest.raises(WireError, match=match):
            codec.encode(body, request_id=1, incarnation=2, arrays=arrays)
    almost = [np.zeros(CONTROL.tensor_bytes, np.uint8)] * 64
    with pytest.raises(WireError, match="in total"):
        codec.encode(RestartService(service="x" * (5 << 20)), request_id=1, incarnation=2, arrays=almost)


def test_control_tensor_over_64_kib_is_also_refused_by_the_receiver() -> None:
    loose = Limits(body_bytes=1 << 20, frames=64, frame_bytes=64 << 10, total_bytes=8 << 20)
    frames = codec.encode(Ack(), request_id=1, incarnation=2, arrays=[np.zeros((64 << 10) + 1, np.uint8)], limits=loose)
    assert len(codec.decode(frames, loose).tensors) == 1
    refuse(frames, "limit is 65536 bytes")


@pytest.mark.parametrize("field", ["request_id", "incarnation"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_header_field_that_does_not_fit_is_refused(field: str, value: int) -> None:
    with pytest.raises(WireError, match="does not fit"):
        codec.encode(Ack(), **{"request_id": 1, "incarnation": 2, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [object(), 1j, {1, 2}.__iter__(), 2**64, "\ud800", [[1]] * 2 + [object()]])
def test_value_that_cannot_be_encoded_is_refused(value: Any) -> None:
    with pytest.raises(WireError, match=r"RestartService|a body cannot hold"):
        codec.encode_body(RestartService(service=value))


def test_excessive_nesting_is_refused_at_the_sender() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(WireError):
        codec.encode_body(RestartService(service=value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x01",
        b"\xc1",
        b"\x80\x80",
        b"\x81",
        b"\xa0",
        b"\x81\xa6cursor\xa1x",
        b"\x81\xa6cursor\xcb",
    ],
)
def test_body_that_is_not_a_map_of_the_message_fields_is_refused(body: bytes) -> None:
    refuse([header(type=GetInventory.TYPE, body=len(body), total=len(body)), body], "GetInventory")


def pack_inline(**changes: Any) -> bytes:
    value = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": b"\0" * 8}
    value.update({key.encode(): each for key, each in changes.items()})
    return msgpack.packb(value)


def decode_inline(packed: bytes) -> Any:
    """Decode a packed array with the whole codec, as `advantages` in the batch of a `ForwardBackward`."""
    rest = {
        "driver": 1, "order": 2,
        "loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "anchor": "proximal", "temperature": 1.0},
    }  # fmt: skip
    body = b"\x84" + b"".join(msgpack.packb(part) for pair in rest.items() for part in pair)
    body += msgpack.packb("batch") + b"\x82" + msgpack.packb("tasks") + msgpack.packb([])
    body += msgpack.packb("scalars") + b"\x81" + msgpack.packb("advantages") + packed
    frames = [header(type=ForwardBackward.TYPE, body=len(body), total=len(body)), body]
    decoded = codec.decode(frames).body
    assert isinstance(decoded, ForwardBackward)
    return decoded.batch.scalars["advantages"]


def test_inline_arrays_are_exchanged_with_msgpack_numpy_in_both_directions() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(decode_inline(msgpack.packb(msgpack_numpy.encode(array))), array)
    ours = msgspec.msgpack.encode(codec.to_map(array))
    np.testing.assert_array_equal(msgpack.unpackb(ours, object_hook=msgpack_numpy.decode), array)


class Bomb:
    """An object that, when it is unpickled, calls a function that fails the test."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("something was unpickled",))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"type": "|O"}, "is not admitted"),
        ({"type": "|O", "kind": b"O", "data": b"cos\nsystem\n(S'true'\ntR."}, "is not admitted"),
        ({"kind": b"O"}, "is not admitted"),
        ({"kind": "O"}, "is not admitted"),
        ({"kind": b"V", "type": [["a", "<f4"]]}, "is not admitted"),
        ({"type": "<f4", "kind": b"V"}, "is not admitted"),
        ({"type": b"<f4"}, "is not admitted"),
        ({"type": ">f4"}, "is not admitted"),
        ({"type": "<c8"}, "is not admitted"),
        ({"type": "|V8", "shape": [1]}, "is not admitted"),
        ({"type": "<U2", "shape": [1]}, "is not admitted"),
        ({"type": "f4"}, "is not admitted"),
        ({"nd": False}, "not a msgpack-numpy array map"),
        ({"nd": 1}, "not a msgpack-numpy array map"),
        ({"complex": True}, "not a msgpack-numpy array map"),
        ({"shape": [3]}, "is not 8 bytes"),
        ({"shape": [-2]}, "dimension -2"),
        ({"shape": [-1, -2]}, "dimension -1"),
        ({"shape": [2.0]}, "dimension 2.0"),
        ({"shape": [True, 2]}, "dimension True"),
        ({"shape": [1] * 9}, "8 dimensions"),
        ({"shape": [2**63, 2]}, "limit is 65536"),
        ({"shape": [0, 2**63], "data": b""}, "limit is 65536"),
        ({"shape": 2}, "8 dimensions"),
        ({"data": "12345678"}, "data must be"),
        ({"data": None}, "data must be"),
        ({"shape": [MAX_INLINE_BYTES], "data": b"\0" * (4 * MAX_INLINE_BYTES)}, "at most 65536 bytes"),
    ],
)
def test_malformed_inline_array_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(WireError, match=match):
        decode_inline(pack_inline(**changes))


def test_object_array_encoded_by_msgpack_numpy_is_refused_and_not_unpickled() -> None:
    array = np.array([Bomb()], dtype=object)
    with pytest.raises(WireError, match="is not admitted"):
        decode_inline(msgpack.packb(msgpack_numpy.encode(array)))


def test_inline_array_outside_the_closed_list_is_refused_at_the_sender() -> None:
    for array, match in [
        (np.array([object()]), "dtype object"),
        (np.zeros(2, dtypes.by_name("bfloat16").numpy), "dtype bfloat16"),
        (np.zeros(2, ">f4"), "dtype >f4"),
        (np.zeros(MAX_INLINE_BYTES + 1, np.uint8), "put it as a shard"),
        (np.zeros((1,) * 9, np.uint8), "8 dimensions"),
        (np.zeros((0, 2**40), np.uint8), "put it as a shard"),
    ]:
        with pytest.raises(WireError, match=match):
            codec.to_map(array)
    assert codec.to_map(np.zeros(MAX_INLINE_BYTES, np.uint8))[b"shape"] == (MAX_INLINE_BYTES,)


def test_decoded_tensors_are_read_only_views_of_their_frame() -> None:
    frames = [bytes(frame) for frame in codec.encode(Ack(), request_id=1, incarnation=2, arrays=[np.arange(5)])]
    [array] = codec.decode(frames).tensors
    assert np.shares_memory(array, np.frombuffer(frames[3], np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_remaining_time_is_replaced_and_its_checksum_recomputed() -> None:
    first, body = codec.encode(Ping(), request_id=7, incarnation=8, remaining_s=3.0)
    again = codec.decode([envelope.with_remaining(first, 1.5), body]).envelope
    assert again == msgspec.structs.replace(codec.decode([first, body]).envelope, remaining_ms=1500)
    assert codec.decode([envelope.with_remaining(first, -1.0), body]).envelope.remaining_ms == 1


def test_dtype_table_is_closed_and_uses_torchs_names() -> None:
    assert [each.code for each in dtypes.TABLE] == list(range(1, 19))
    for each in dtypes.TABLE:
        assert dtypes.by_code(each.code) is dtypes.by_name(each.name) is dtypes.by_numpy(each.numpy) is each
    for call, match in [
        (lambda: dtypes.by_code(0), "code 0"),
        (lambda: dtypes.by_name("complex64"), "'complex64'"),
        (lambda: dtypes.by_numpy(np.dtype("O")), "object"),
    ]:
        with pytest.raises(WireError, match=match):
            call()


def test_message_numbers_are_unique_and_requests_name_their_reply() -> None:
    numbers = all_messages()
    assert all(number == cls.TYPE for number, cls in numbers.items())
    for cls in numbers.values():
        reply = getattr(cls, "REPLY", None)
        assert reply is None or numbers[reply.TYPE] is reply
    with pytest.raises(ValueError, match="message type 2: taken by"):
        message(2)(type("Other", (Message,), {}))
    with pytest.raises(ValueError, match=r"outside 1\.\.65535"):
        message(65536)(type("Other", (Message,), {}))


@pytest.mark.parametrize(
    "task_id",
    ["", "train", "train/0", "train/0/1/2", "train/a/1", "/0/1", "train/0/1\n", "tr ain/0/1", "../0/1x", "train/-1/0",
     "train/0/" + "1" * 250, "train/0/٣"],
)  # fmt: skip
def test_malformed_task_id_is_refused(task_id: str) -> None:
    with pytest.raises(WireError, match="task id"):
        check_task_id(task_id)


@pytest.mark.parametrize("key", ["", "/etc/passwd", ".", "a b", "a\n", "é", "k" * 256])
def test_malformed_shard_key_is_refused(key: str) -> None:
    with pytest.raises(WireError, match="shard key"):
        check_key(key)


def test_task_ids_can_be_split_into_their_parts() -> None:
    assert split_task_id(make_task_id("eval-math", 12, 7)) == ("eval-math", 12, 7)
    assert new_incarnation() in range(1, 2**63)


def test_error_codes_are_a_closed_list_of_distinct_words() -> None:
    words = list(ErrorCode)
    assert len(words) == len(set(words)) == 12
