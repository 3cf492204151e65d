"""The sender of a message: the routing id for answers, the proved role, and the account to which offences are
charged."""

from __future__ import annotations

from typing import NamedTuple

from shared.security.roles import Role

Account = tuple[int, Role, bytes]
"""Account to which offences and unread answers are charged: the door of the mailbox, the role, and an identity.

The identity of a guest (observer, operator) is the address of its host, so all connections that one of these keys opens
from that host share one account. A service is identified by the routing id of its connection, because the services of a
host must not be silenced for the faults of one of them."""


class Sender(NamedTuple):
    """The sender of one message."""

    peer: bytes
    """Routing id to which answers are sent."""
    role: Role
    account: Account

    @property
    def is_guest(self) -> bool:
        return self.role < Role.SERVICE

    def __str__(self) -> str:
        who = self.account[2]
        return f"{self.role.label} at {who.decode('ascii', 'replace')}" if self.is_guest else who.hex()


def sender(door: int, role: Role, peer: bytes, address: bytes = b"") -> Sender:
    """Return the sender of a message. `address` is the address of the connecting host, empty on ipc."""
    return Sender(peer, role, (door, role, peer if role is Role.SERVICE else address))
