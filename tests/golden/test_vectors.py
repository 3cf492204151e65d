"""The stored vectors and this implementation agree byte for byte, both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proto import codec, dtypes
from proto.limits import Limits
from tests.golden.vectors import FOLDER, INDEX, Vector, entry, plain, read, tensor, vectors

ENTRIES: list[dict[str, Any]] = json.loads(INDEX.read_text())
LOOSE = Limits(body_bytes=1 << 16, frames=64, frame_bytes=1 << 16, total_bytes=1 << 20)


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.name)
def test_encoding_gives_the_stored_bytes(vector: Vector) -> None:
    stored = {each["name"]: each for each in ENTRIES}[vector.name]
    frames = vector.frames()
    assert entry(vector, frames) == stored
    assert frames == read(vector.name, stored["frames"])


@pytest.mark.parametrize("stored", ENTRIES, ids=lambda each: each["name"])
def test_decoding_gives_the_stored_values(stored: dict[str, Any]) -> None:
    decoded = codec.decode(read(stored["name"], stored["frames"]), LOOSE)
    head = decoded.envelope
    assert (head.type, head.flags, head.request_id, head.incarnation, head.remaining_ms) == tuple(
        stored[name] for name in ("type", "flags", "request_id", "incarnation", "remaining_ms")
    )
    assert type(decoded.body).__name__ == stored["message"]
    assert plain(decoded.body) == stored["body"]
    assert [tensor(array) for array in decoded.tensors] == stored["tensors"]


def test_every_file_is_in_the_index_and_every_dtype_in_a_vector() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.bin")) == sorted(each["file"] for each in ENTRIES)
    seen = {each["dtype"] for stored in ENTRIES for each in stored["tensors"]}
    assert seen == {row.name for row in dtypes.TABLE}
    assert any(len(stored["frames"]) > 4 and stored["frame_bytes_limit"] == 16 for stored in ENTRIES)
