"""Detects whether a process shares memory with a store, without configuration and regardless of host names and paths.

The store writes a random token to a file next to its shards. A process that reads the same token sees the same file
system. The boot id separates hosts that share a network file system, where mappings and locks behave differently.
"""

from __future__ import annotations

import os
import secrets
from enum import StrEnum
from pathlib import Path

from proto.messages import StorePlace
from shared.os_limits import NO_DESCRIPTOR

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reach(StrEnum):
    """The ways in which a reader accesses shards."""

    AUTO = "auto"  # map where memory is shared, stream elsewhere
    STREAM = "stream"  # always stream, as from another host


def write_place(path: str) -> StorePlace:
    """Create the token file of a store, or reuse an existing one. Only its owner can read it."""
    boot_id = _boot_id()
    token = f"{boot_id} {secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        written = Path(path).read_text()
        if written.startswith(boot_id):
            return StorePlace(path=path, token=written)
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return StorePlace(path=path, token=token)


def shares_memory(place: StorePlace) -> bool:
    """Return whether this process can map the store's files at `place`. Raises OSError if no descriptor is left."""
    if not place.token.startswith(_boot_id()):
        return False
    try:
        return Path(place.path).read_text() == place.token
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return False


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
