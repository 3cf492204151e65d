"""Counts offences by account and decides which accounts are in quarantine. It is pure, and bounded in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.rpc.sender import Account

STRIKES = 32
"""Number of offences within `WINDOW_S` that put an account into quarantine."""
WINDOW_S = 60.0
QUARANTINE_S = 10.0
MAX_PEERS = 1024
"""Maximum number of remembered accounts. The account whose last offence is oldest is forgotten first."""


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
