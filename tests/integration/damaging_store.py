"""A store that relays a version with one wrong bit: `python -m tests.integration.damaging_store --run D`."""

from __future__ import annotations

import sys

from services.batch_store.relay import CHUNK_BYTES, FillingFile
from services.batch_store.server import StoreService
from shared.actor.process import run_process

DAMAGED_CHUNK = 5
_pieces = FillingFile.pieces


def damaged(self: FillingFile, at: int, nbytes: int) -> list[memoryview]:
    (piece,) = _pieces(self, at, nbytes)
    if at // CHUNK_BYTES != DAMAGED_CHUNK:
        return [piece]
    copy = bytearray(piece)
    copy[100] ^= 1
    return [memoryview(copy)]


if __name__ == "__main__":
    FillingFile.pieces = damaged  # type: ignore[method-assign]
    sys.exit(run_process(StoreService, "batch_store"))
