"""Who sent a message: where answers go, what the sender has proved to be, and who answers for what it does."""

from __future__ import annotations

from typing import NamedTuple

from shared.security.roles import Role

Account = tuple[int, Role, bytes]
"""Who answers for offences and for answers left unread: the door of the mailbox, the role, and for services the routing
id of their connection, for guests (observers, operators) the address of their host: all connections that one of their
keys opens from there are one. Services of one host must not be silenced for one of them."""


class Sender(NamedTuple):
    """Of one message."""

    peer: bytes
    """Routing id to answer to."""
    role: Role
    account: Account

    @property
    def is_guest(self) -> bool:
        return self.role < Role.SERVICE

    def __str__(self) -> str:
        who = self.account[2]
        return f"{self.role.label} at {who.decode('ascii', 'replace')}" if self.is_guest else who.hex()


def sender(door: int, role: Role, peer: bytes, address: bytes = b"") -> Sender:
    """`address`: of the host that the connection comes from; it says nothing on ipc."""
    return Sender(peer, role, (door, role, peer if role is Role.SERVICE else address))
