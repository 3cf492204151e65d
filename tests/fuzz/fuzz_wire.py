"""A coverage-guided fuzz target for all code that decodes bytes from peers: `python -m tests.fuzz.fuzz_wire [libFuzzer
options]`. It needs atheris.

For any bytes, a decoder raises WireError or returns a value that can be encoded again.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["proto", "shared.dataplane"]):
    import proto.messages  # noqa: F401  # fills the registry
    from proto import codec, envelope
    from proto.errors import WireError
    from proto.limits import Limits
    from tests.fuzz import stream_inputs

# numpy and msgspec are not instrumented; what they do is visible only through the branches of proto.
LIMITS = Limits(body_bytes=1 << 16, frames=32, frame_bytes=1 << 12, total_bytes=1 << 16, tensor_bytes=1 << 14)
RAW, SEALED, FILE, SEALED_FILE, BULK, SEALED_BULK, ARRIVAL = range(7)
_LENGTH = struct.Struct("<H")


def pack(kind: int, frames: list[bytes]) -> bytes:
    """Return an input: the byte that selects the target, then each frame preceded by its length."""
    return bytes([kind]) + b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def unpack(data: bytes) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(data) and len(frames) <= LIMITS.frames + 4:
        (size,) = _LENGTH.unpack_from(data, at)
        frames.append(data[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    return frames


def sealed(frames: list[bytes]) -> list[bytes]:
    """Return the frames under an envelope that describes them, so that the layers behind the checksum of the envelope
    are reached."""
    if len(frames) < 2 or len(frames[0]) < 4:
        return frames
    kind, has_table = _LENGTH.unpack_from(frames[0])[0], bool(frames[0][2] & 1) and len(frames) > 2
    body, rest = frames[1], frames[2:]
    head = envelope.Envelope(
        type=kind,
        request_id=1,
        incarnation=2,
        flags=envelope.FLAG_TABLE if has_table else 0,
        body_bytes=len(body),
        frame_count=len(rest) - has_table,
        table_bytes=len(rest[0]) if has_table else 0,
        total_bytes=len(body) + sum(map(len, rest)),
    )
    return [head.pack(), body, *rest]


def one_input(data: bytes) -> None:
    """Run one decoder on the input. An exception means a defect."""
    accepted(data)


def accepted(data: bytes) -> bool:
    """Return whether the decoder accepted the input. An exception means a defect."""
    kind, rest = (data[0], data[1:]) if data else (RAW, b"")
    try:
        if kind in (FILE, SEALED_FILE):
            stream_inputs.read_file(stream_inputs.sealed_file(rest) if kind == SEALED_FILE else rest)
        elif kind in (BULK, SEALED_BULK):
            stream_inputs.read_bulk(stream_inputs.sealed_bulk(rest) if kind == SEALED_BULK else rest)
        elif kind == ARRIVAL:
            stream_inputs.receive(rest)
        else:
            read_message(unpack(rest), kind)
    except WireError:
        return False
    return True


def read_message(frames: list[bytes], kind: int) -> None:
    """Check that the decoded message can be encoded again."""
    decoded = codec.decode(sealed(frames) if kind == SEALED else frames, LIMITS)
    codec.encode(decoded.body, request_id=0, incarnation=0, arrays=decoded.tensors, limits=LIMITS)


def write_seeds(folder: Path) -> int:
    """Write the golden vectors, small block files, bulk messages and streams as initial inputs. Return their number."""
    import json

    from tests.golden.vectors import INDEX, read

    seeds: list[bytes] = []
    for each in json.loads(INDEX.read_text()):
        frames = read(each["name"], each["frames"])
        seeds.append(pack(RAW, frames))
        short = _LENGTH.pack(each["type"]) + bytes([each["flags"] >> 2, 0])
        seeds.append(pack(SEALED, [short, *frames[1:]]))
    seeds += [bytes([kind]) + stream_inputs.whole_file(tasks)[0] for kind in (FILE, SEALED_FILE) for tasks in (1, 2)]
    seeds += [bytes([kind]) + stream_inputs.bulk_seed() for kind in (BULK, SEALED_BULK)]
    for flags, tasks in ((0, 1), (1 | 2 | 4, 1), (1 | 2 | 4 | 8, 2), (1 | 2 | 4 | 8 | 16, 2)):
        seeds.append(bytes([ARRIVAL]) + stream_inputs.arrival_seed(flags, tasks))
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    return len(seeds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seeds"]:
        print(write_seeds(Path(sys.argv[2])))
    else:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
