"""Reads and writes access files. An access file gives another machine access to a run in one role. It holds the keys
of that role and the endpoints that the role can reach.

The file holds no other role's secrets. Possession of the file grants the role, so it is written with mode 0600, and a
file that others can read is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.security import keys
from shared.security.curve import is_tcp
from shared.security.keys import Keyring
from shared.security.roles import Role

FILE_LIMIT_BYTES = 1 << 20
ANNOUNCED = ("scheduler", "supervisor", "monitor")
"""The services whose ports are known before the run starts. The scheduler knows the endpoints of all others."""


@dataclass(frozen=True)
class Access:
    """The content of an access file: the role, its keys and the endpoints that it can reach."""

    name: str
    """Name of the run."""
    keys: Keyring
    endpoints: dict[str, str]
    """`tcp://ADDRESS:PORT` by service, for the services in `ANNOUNCED`."""
    topology: str = ""
    """The resolved topology as YAML, for the role service, which joins the run."""

    @property
    def role(self) -> Role:
        return self.keys.role


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    role: str
    public: str
    secret: str
    known: dict[str, str]
    """Public keys by role. The key of `service` is the server key of every endpoint."""
    endpoints: dict[str, str]
    topology: str = ""


def write(path: Path, access: Access) -> None:
    """Write `access` to `path` with mode 0600, replacing an existing file. Raises OSError."""
    keys.write_private(path, _content(access))


def read(path: Path) -> Access:
    """Return the content of an access file. Raises RpcError(bad_request) if it is missing, not private or damaged."""
    return _access(path, keys.read_private(path, _File, FILE_LIMIT_BYTES))


def encode(access: Access) -> bytes:
    """Return `access` as one line of JSON. It holds secrets, so send it only through private pipes."""
    return msgspec.json.encode(_content(access)) + b"\n"


def decode(data: bytes) -> Access:
    """Return the access that `encode` encoded. Raises RpcError(bad_request) if `data` is damaged."""
    where = Path("(standard input)")
    try:
        return _access(where, msgspec.json.decode(data, type=_File))
    except msgspec.MsgspecError:
        raise keys.damaged(where, "it is not an access file") from None


def _content(access: Access) -> _File:
    ring = access.keys
    known = {role.label: key.decode() for role, key in ring.known.items()}
    return _File(
        run=access.name,
        role=ring.role.label,
        public=ring.public.decode(),
        secret=ring.secret.decode(),
        known=known,
        endpoints=access.endpoints,
        topology=access.topology,
    )


def _access(path: Path, content: _File) -> Access:
    try:
        role = Role.of_label(content.role)
        known = {one: content.known[one.label] for one in Role}
    except (ValueError, KeyError):
        raise keys.damaged(path, "a role is missing or unknown") from None
    if not all(is_tcp(content.endpoints.get(service, "")) for service in ANNOUNCED):
        raise keys.damaged(path, f"it does not say where {', '.join(ANNOUNCED)} answer")
    ring = keys.keyring(path, role, content.public, content.secret, known)
    return Access(content.run, ring, content.endpoints, content.topology)
