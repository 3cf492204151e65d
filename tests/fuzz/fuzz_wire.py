"""A coverage-guided target over what reads foreign bytes: `python -m tests.fuzz.fuzz_wire [libFuzzer options]`.

Needs atheris. It must find nothing: whatever the bytes, a decoder raises WireError or gives what encodes again.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["proto"]):
    import proto.messages  # noqa: F401  # fills the registry
    from proto import blockfile, codec, envelope
    from proto.errors import WireError
    from proto.limits import Limits

# numpy and msgspec are not instrumented: what they do with the bytes is seen through what proto does with it
LIMITS = Limits(body_bytes=1 << 16, frames=32, frame_bytes=1 << 12, total_bytes=1 << 16, tensor_bytes=1 << 14)
RAW, SEALED, FILE = 0, 1, 2
_LENGTH = struct.Struct("<H")


def pack(kind: int, frames: list[bytes]) -> bytes:
    """An input: which target, then each frame behind its length."""
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
    """With an envelope that tells the truth about them, so that the layers below its checksum are reached."""
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
    """Raises for a defect only."""
    if not data:
        return
    try:
        if data[0] == FILE:
            table = blockfile.parse(data[1:], len(data) - 1)
            for task in range(len(table.task_ids)):
                assert sum(shard.nbytes for shard in table.shards(task)) == table.task_bytes(task)
            return
        frames = unpack(data[1:])
        decoded = codec.decode(sealed(frames) if data[0] == SEALED else frames, LIMITS)
    except WireError:
        return
    codec.encode(decoded.body, request_id=0, incarnation=0, arrays=decoded.tensors, limits=LIMITS)


def write_seeds(folder: Path) -> int:
    """The golden vectors and a small block file, as inputs; returns how many."""
    import json

    import numpy as np

    from proto.tensors import as_wire
    from tests.golden.vectors import INDEX, read

    seeds: list[bytes] = []
    for each in json.loads(INDEX.read_text()):
        frames = read(each["name"], each["frames"])
        seeds.append(pack(RAW, frames))
        short = _LENGTH.pack(each["type"]) + bytes([each["flags"] >> 2, 0])
        seeds.append(pack(SEALED, [short, *frames[1:]]))
    layout = blockfile.Layout([("train/0/1", 3, {"a": as_wire(np.arange(3.0)), "b": as_wire(np.zeros(0, np.int8))})])
    file = bytearray(layout.file_bytes)
    head = layout.head([blockfile.xxhash.xxh3_64_intdigest(array.tobytes()) for array in layout.arrays])
    file[: len(head)] = head
    seeds.append(bytes([FILE]) + bytes(file))
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    return len(seeds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seeds"]:
        print(write_seeds(Path(sys.argv[2])))
    else:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
