"""The sender of a message, and the offences charged to its account. The module is pure, and bounded in memory.

Offences decide which accounts are in quarantine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from shared.security.roles import Role

STRIKES = 32
"""Number of offences within `WINDOW_S` that put an account into quarantine."""
WINDOW_S = 60.0
QUARANTINE_S = 10.0
MAX_PEERS = 1024
"""Maximum number of remembered accounts. The account whose last offence is oldest is forgotten first."""


Account = tuple[int, Role, bytes]
"""Account to which offences and unread answers are charged: the door of the mailbox, the role, and an identity.

The identity of a guest (observer, operator) is the address of its host, so all connections that one of these keys opens
from that host share one account. A service is identified by the routing id of its connection, because the services of a
host must not be silenced for the faults of one of them."""


class Sender(NamedTuple):
    """The sender of one message, which came through the `door` of this number."""

    door: int
    role: Role
    """The role that the sender has proved."""
    peer: bytes
    """Routing id to which answers are sent."""
    address: bytes = b""
    """Address of the connecting host, empty on ipc."""

    @property
    def is_guest(self) -> bool:
        return self.role < Role.SERVICE

    @property
    def account(self) -> Account:
        return self.door, self.role, self.address if self.is_guest else self.peer

    def __str__(self) -> str:
        who = self.account[2]
        return f"{self.role.label} at {who.decode('ascii', 'replace')}" if self.is_guest else who.hex()


@dataclass(slots=True)
class _OffenceRecord:
    strikes: int
    since: float
    until: float = 0.0


class Offenders:
    """Offences by account. Times are in seconds from any monotonic clock."""

    def __init__(self) -> None:
        self.malformed = 0
        """Total number of messages that could not be decoded."""
        self.forbidden = 0
        """Total number of messages that the role of their sender may not send."""
        self.unread = 0
        """Total number of messages dropped because their sender was in quarantine."""
        self.quarantines = 0
        self._records: OrderedDict[Account, _OffenceRecord] = OrderedDict()
        self._held = 0.0
        """Time at which the last quarantine ends."""

    def __len__(self) -> int:
        return len(self._records)

    def strikes(self, account: Account) -> int:
        """Return the number of offences by this account in its current window."""
        record = self._records.get(account)
        return record.strikes if record is not None else 0

    def strike(self, account: Account, now: float) -> bool:
        """Count one more offence. Return True if it puts the account into quarantine."""
        record = self._records.get(account)
        if record is None or now - record.since > WINDOW_S:
            record = self._records[account] = _OffenceRecord(0, now)
            if len(self._records) > MAX_PEERS:
                self._records.popitem(last=False)
        self._records.move_to_end(account)
        record.strikes += 1
        if record.strikes < STRIKES:
            return False
        record.strikes, record.since = 0, now
        record.until = self._held = now + QUARANTINE_S
        self.quarantines += 1
        return True

    def unheard(self, account: Account, now: float) -> bool:
        """Return whether to drop a message from this account undecoded, and count it if so."""
        if now >= self._held:
            return False
        record = self._records.get(account)
        if record is None or now >= record.until:
            return False
        self.unread += 1
        return True
