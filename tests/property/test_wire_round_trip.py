"""Checks round trips over the wire: every message, dtype and shape that can be encoded is equal after decoding."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto import codec, tensors
from proto.errors import WireError
from proto.limits import CONTROL, Limits
from proto.messages import Ack
from proto.registry import Message, all_messages
from proto.tensors import Array
from tests.property.wire_strategies import any_array, any_message, of_struct, same

WIDE = Limits(body_bytes=1 << 20, frames=1024, frame_bytes=1 << 20, total_bytes=1 << 30)
TINY_FRAMES = Limits(body_bytes=1 << 20, frames=1 << 16, frame_bytes=7, total_bytes=1 << 24)


@pytest.mark.parametrize("number", sorted(all_messages()))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_message_survives_a_round_trip(number: int, data: st.DataObject) -> None:
    body = data.draw(of_struct(all_messages()[number]))
    frames = codec.encode(body, request_id=1, incarnation=2)
    decoded = codec.decode([bytes(frame) for frame in frames])
    assert same(decoded.body, body)
    assert codec.encode(decoded.body, request_id=1, incarnation=2) == frames


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    body=any_message(),
    arrays=st.lists(any_array(), max_size=4),
    request_id=st.integers(0, 2**64 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    remaining_s=st.floats(0, 1e9),
    limits=st.sampled_from([CONTROL, WIDE, TINY_FRAMES]),
)
def test_header_and_tensors_survive_a_round_trip(
    body: Message, arrays: list[Array], request_id: int, incarnation: int, remaining_s: float, limits: Limits
) -> None:
    frames = codec.encode(
        body, request_id=request_id, incarnation=incarnation, remaining_s=remaining_s, arrays=arrays, limits=limits
    )
    decoded = codec.decode([bytes(frame) for frame in frames], limits)
    assert (decoded.envelope.request_id, decoded.envelope.incarnation) == (request_id, incarnation)
    assert decoded.envelope.remaining_ms == min(int(remaining_s * 1000), 2**32 - 1)
    assert all(len(frame) <= max(limits.frame_bytes, limits.body_bytes) for frame in frames)
    assert len(decoded.tensors) == len(arrays)
    for got, sent in zip(decoded.tensors, arrays, strict=True):
        assert same(got, sent)
        assert not got.flags.writeable


@given(array=any_array())
def test_big_endian_and_strided_arrays_keep_their_values_on_the_wire(array: Array) -> None:
    for source in (array[::-1] if array.ndim else array, array.astype(array.dtype.newbyteorder(">"))):
        table, frames = tensors.encode([source], WIDE)
        [got] = tensors.decode(table, [bytes(frame) for frame in frames], WIDE)
        assert same(got, source.astype(got.dtype))


@given(array=any_array())
def test_inline_array_survives_a_round_trip_or_is_refused_with_an_error_that_names_its_type(array: Array) -> None:
    if array.dtype.str not in codec.INLINE_TYPES:
        with pytest.raises(WireError, match=str(array.dtype)):
            codec.to_map(array)
        return
    made = codec.to_map(array)
    assert same(codec.from_map(made), array)


def test_unknown_fields_and_positions_of_a_newer_minor_version_are_ignored() -> None:
    head = codec.encode(Ack(), request_id=1, incarnation=2)
    body = b"\x82\xa6future\x93\x01\xa1x\xc0\xa5later\xc3"
    minor = codec.envelope.MINOR + 1
    packed = codec.envelope.Envelope(
        type=Ack.TYPE,
        request_id=1,
        incarnation=2,
        flags=0x8000,
        body_bytes=len(body),
        total_bytes=len(body),
        minor=minor,
    ).pack()
    assert codec.decode([packed, body]).body == Ack()
    assert codec.decode(head).body == Ack()
