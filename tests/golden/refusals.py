"""Defines the golden messages that a mailbox refuses: one for each violation of proto/SPEC.md section 7 that a peer on
the same host can commit with one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from proto import codec
from proto.envelope import FLAG_ONE_WAY, FLAG_REPLY, FLAG_TABLE, Envelope
from proto.limits import CONTROL
from proto.messages import Complete, ErrorCode, Ping, PutSeal

REQUEST_ID = 7
PUT_ID = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Refusal:
    """A message that a mailbox refuses. `answered` is the code of the answer, or None if the message is not
    answered."""

    name: str
    purpose: str
    frames: list[bytes]
    answered: str | None
    strike: bool = True


def _enveloped(body: bytes, kind: int = Ping.TYPE, **fields: int) -> list[bytes]:
    """Return a body under an envelope that matches it, except for `fields`."""
    values = {"body_bytes": len(body), "total_bytes": len(body)} | fields
    return [Envelope(type=kind, request_id=REQUEST_ID, incarnation=1, remaining_ms=1000, **values).pack(), body]


def _changed(offset: int, data: bytes) -> list[bytes]:
    """Return a `Ping` whose envelope has the given bytes at an offset, and a checksum that covers them."""
    head, body = _enveloped(b"\x80")
    head = head[:offset] + data + head[offset + len(data) : 56]
    return [head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little"), body]


def _with_tensor(*, checksum_change: int) -> list[bytes]:
    """Return a `Ping` with one tensor, whose checksum in the table is changed."""
    frames = [
        bytes(frame)
        for frame in codec.encode(
            Ping(), request_id=REQUEST_ID, incarnation=1, remaining_s=1.0, arrays=[np.arange(3, dtype=np.uint8)]
        )
    ]
    frames[2] = frames[2][:24] + bytes([frames[2][24] ^ checksum_change]) + frames[2][25:]
    return frames


def _pickled() -> bytes:
    """Return a `Complete` whose scalar has kind `O`, which msgpack-numpy would unpickle."""
    body = codec.encode_body(
        Complete(lease_id=1, stage="rollout", incarnation=1, results=[], scalars={"x": np.zeros(1, np.float32)})
    )
    assert body.count(b"\xc4\x04kind\xc4\x00") == 1
    return body.replace(b"\xc4\x04kind\xc4\x00", b"\xc4\x04kind\xc4\x01O")


def refusals() -> list[Refusal]:
    """Return all refused messages, in the order of the table in section 7."""
    bad = ErrorCode.BAD_REQUEST
    head, body = _enveloped(b"\x80")
    sealed = codec.encode_body(PutSeal(put_id=PUT_ID))
    return [
        Refusal("no_body", "an envelope without a body frame", [head], bad),
        Refusal("length", "an envelope of 63 bytes", [head[:63], body], None),
        Refusal("magic", "a wrong magic", _changed(0, b"RLBX"), None),
        Refusal("major", "major version 2", _changed(4, b"\x02"), None),
        Refusal("checksum", "a checksum that does not match", [head[:63] + bytes([head[63] ^ 1]), body], None),
        Refusal("flags", "flag 8, which this minor version does not define", _changed(8, b"\x08"), None),
        Refusal("reserved", "a reserved field that is not 0", _changed(44, b"\x01"), None),
        Refusal(
            "limit",
            "a body that is announced with one byte more than the limit",
            _enveloped(b"\x80", body_bytes=CONTROL.body_bytes + 1, total_bytes=CONTROL.body_bytes + 1),
            None,
        ),
        Refusal("body_bytes", "a body that is longer than announced", [head, body + b"\x80"], bad),
        Refusal("frame", "a raw frame that the envelope does not announce", [head, body, b"\x00"], bad),
        Refusal("type", "message number 60000", _enveloped(b"\x80", 60000), bad, strike=False),
        Refusal("reply", "flag REPLY", _enveloped(b"\x80", flags=FLAG_REPLY), None),
        Refusal("one_way", "a request with flag ONE_WAY", _enveloped(b"\x80", flags=FLAG_ONE_WAY), None),
        Refusal("tensor", "a tensor whose checksum does not match", _with_tensor(checksum_change=1), bad),
        Refusal(
            "table",
            "a tensor table of 95 bytes",
            [
                *_enveloped(b"\x80", flags=FLAG_TABLE, table_bytes=95, total_bytes=96),
                bytes(95),
            ],
            bad,
        ),
        Refusal("array", "a body that is an array", _enveloped(b"\x90"), bad),
        Refusal("trailing", "a byte after the body's map", _enveloped(b"\x80\xc0"), bad),
        Refusal("field", "a field that is missing (PutSeal.put_id)", _enveloped(b"\x80", PutSeal.TYPE), bad),
        Refusal(
            "bin",
            "a str that is written as bin (PutSeal.put_id)",
            _enveloped(sealed.replace(b"\xd9\x20", b"\xc4\x20"), PutSeal.TYPE),
            bad,
        ),
        Refusal("pickle", "an inline array of kind O", _enveloped(_pickled(), Complete.TYPE), bad),
    ]


def entry(refusal: Refusal) -> dict[str, Any]:
    """Return the entry for one message in refused.json, with frames in hexadecimal digits."""
    return {
        "name": refusal.name,
        "purpose": refusal.purpose,
        "frames": [frame.hex() for frame in refusal.frames],
        "request_id": REQUEST_ID,
        "answered": refusal.answered,
        "counted": "malformed",
        "strike": refusal.strike,
    }
