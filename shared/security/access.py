"""One file that gives another machine access to a run in one role: its keys, and where the run answers.

It must hold no secret of another role. Whoever has it is that role: it is written for its owner only, and what others
can read is not taken.
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
"""Who answers other hosts at a port known before the run starts; the scheduler knows where all others are."""


@dataclass(frozen=True)
class Access:
    """What the holder of an access file can reach, and as what."""

    name: str
    """The run's."""
    keys: Keyring
    endpoints: dict[str, str]
    """`tcp://ADDRESS:PORT` by service, for those of `ANNOUNCED`."""
    topology: str = ""
    """For the role service, which joins the run: the resolved topology, as YAML."""

    @property
    def role(self) -> Role:
        return self.keys.role


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    role: str
    public: str
    secret: str
    known: dict[str, str]
    """Role -> public key. The key of `service` is the server key of every endpoint."""
    endpoints: dict[str, str]
    topology: str = ""


def write(path: Path, access: Access) -> None:
    """Write it to `path`, mode 0600, in place of what was there. Raises OSError."""
    ring = access.keys
    known = {role.label: key.decode() for role, key in ring.known.items()}
    content = _File(
        run=access.name,
        role=ring.role.label,
        public=ring.public.decode(),
        secret=ring.secret.decode(),
        known=known,
        endpoints=access.endpoints,
        topology=access.topology,
    )
    keys.write_private(path, content)


def read(path: Path) -> Access:
    """What `write` wrote. Raises RpcError(bad_request) naming the file: missing, readable by others, or damaged."""
    content = keys.read_private(path, _File, FILE_LIMIT_BYTES)
    try:
        role = Role.of_label(content.role)
        known = {each: content.known[each.label] for each in Role}
    except (ValueError, KeyError):
        raise keys.damaged(path, "a role is missing or unknown") from None
    if not all(is_tcp(content.endpoints.get(service, "")) for service in ANNOUNCED):
        raise keys.damaged(path, f"it does not say where {', '.join(ANNOUNCED)} answer")
    ring = keys.keyring(path, role, content.public, content.secret, known)
    return Access(content.run, ring, content.endpoints, content.topology)
