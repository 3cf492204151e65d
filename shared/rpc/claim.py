"""One owner for each ipc endpoint: a lock file beside the socket decides, and the kernel frees it when its holder dies.

libzmq's bind silently takes over the path of a live peer, and its close unlinks that path some time later. So nothing
here may bind to the final path: a socket is bound beside it and renamed under the lock, and only the lock's holder
unlinks it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

IPC = "ipc://"
LOCK_SUFFIX = ".lock"
SCRATCH_BYTES = len(".ffff")
"""What the path that is bound first is longer than the final one; ipc paths end at 107 bytes."""


def socket_path(endpoint: str) -> Path | None:
    """The file of an ipc endpoint; None for other transports, wildcards and abstract names."""
    name = endpoint.removeprefix(IPC)
    return Path(name) if endpoint.startswith(IPC) and name[:1] not in ("", "*", "@") else None


class Claim:
    """The right to answer at one socket path. Children forked without exec share it until they end too."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._lock = Path(f"{path}{LOCK_SUFFIX}")
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """Lock `path` for this process; None when another live owner has it. Raises OSError for a missing folder."""
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
        """Where to bind before `publish`. `salt` tells lives apart: a closing one unlinks its own scratch path."""
        return Path(f"{self._path}.{salt & 0xFFFF:04x}")

    def publish(self, scratch: Path) -> None:
        """Put the bound socket at the path, in place of what a killed owner left there."""
        scratch.rename(self._path)

    def release(self) -> None:
        """Remove the socket file and the lock, and let others have the path."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            self._lock.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
