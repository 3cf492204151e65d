"""Exclusive ownership of ipc endpoints: a lock on a file beside each socket, released by the kernel if its holder dies.

libzmq's bind silently takes over the path of a live peer, and its close unlinks that path some time later. Sockets are
therefore bound to a scratch path and renamed under the lock, and only the holder of the lock unlinks the final path.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

IPC = "ipc://"
LOCK_SUFFIX = ".lock"
SCRATCH_BYTES = len(".ffff")
"""Length by which the scratch path exceeds the final path. ipc paths are limited to 107 bytes."""


def socket_path(endpoint: str) -> Path | None:
    """Return the socket file of an ipc endpoint, or None for other transports, wildcards and abstract names."""
    name = endpoint.removeprefix(IPC)
    return Path(name) if endpoint.startswith(IPC) and name[:1] not in ("", "*", "@") else None


class Claim:
    """The right to answer at one socket path. Children forked without exec share it until they exit."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._lock = Path(f"{path}{LOCK_SUFFIX}")
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """Lock `path` for this process. Return None if a live process owns it. Raises OSError for a missing folder."""
        lock = Path(f"{path}{LOCK_SUFFIX}")
        while True:
            descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                    return cls(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass  # its last owner unlinked it between our open and our lock
            os.close(descriptor)

    def scratch(self, salt: int) -> Path:
        """Return the path to bind before `publish`.

        `salt` differs between lives, so that each life unlinks only its own path.
        """
        return Path(f"{self._path}.{salt & 0xFFFF:04x}")

    def publish(self, scratch: Path) -> None:
        """Rename the bound socket to the final path, replacing a file that a killed owner left there."""
        scratch.rename(self._path)

    def release(self) -> None:
        """Remove the socket file and the lock, so that another process can claim the path."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            self._lock.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
