"""The keys of clients. A key has a name, which is what the journal, the limits and the log know of it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shared.guest_server import Secret
from shared.topology.serve import KEY_FORM, MADE_KEYS, read_keys


def make(folder: Path) -> str:
    """Return the path of the file in `folder`, the run's folder of keys, with one key, and write it if it is not
    there."""
    file = folder / MADE_KEYS
    if not file.exists():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"client {KEY_FORM}{secrets.token_hex(24)}\n")
    return str(file)


class ClientKeys:
    """The keys of a file."""

    def __init__(self, file: str) -> None:
        """Raises KeysError."""
        self._secrets = {name: Secret(key) for name, key in read_keys(file).items()}

    def __len__(self) -> int:
        return len(self._secrets)

    def name_of(self, given: str) -> str | None:
        """Return the name of a key, or None if it is no key. Every key is compared, in constant time."""
        matches = [name for name, secret in self._secrets.items() if secret.matches(given)]
        return matches[0] if matches else None
