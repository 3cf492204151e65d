"""Who sends what it must not, and who of them is not listened to for a while. Bounded, pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.rpc.sender import Account

STRIKES = 32
"""So many offences within `WINDOW_S` put an account into quarantine."""
WINDOW_S = 60.0
QUARANTINE_S = 10.0
MAX_PEERS = 1024
"""Accounts remembered; the one whose last offence is longest ago is forgotten first."""


@dataclass(slots=True)
class _Record:
    strikes: int
    since: float
    until: float = 0.0


class Offenders:
    """Counts offences by account. Times are of any steady clock, in seconds."""

    def __init__(self) -> None:
        self.malformed = 0
        """Messages that could not be read, in all."""
        self.forbidden = 0
        """Messages that the sender's role may not send, in all."""
        self.unread = 0
        """Messages dropped unread because their sender was in quarantine, in all."""
        self.quarantines = 0
        self._records: OrderedDict[Account, _Record] = OrderedDict()
        self._held = 0.0
        """No quarantine is longer than until then."""

    def __len__(self) -> int:
        return len(self._records)

    def strikes(self, account: Account) -> int:
        """Offences of this account since its count began."""
        record = self._records.get(account)
        return record.strikes if record is not None else 0

    def strike(self, account: Account, now: float) -> bool:
        """One more offence. True: the account is in quarantine from now on."""
        record = self._records.get(account)
        if record is None or now - record.since > WINDOW_S:
            record = self._records[account] = _Record(0, now)
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
        """Whether a message of this account is to be dropped unread; counts it if so."""
        if now >= self._held:
            return False
        record = self._records.get(account)
        if record is None or now >= record.until:
            return False
        self.unread += 1
        return True
