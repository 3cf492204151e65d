"""How many bytes of answers wait for peers of other hosts to read them, and for whom no more are kept.

libzmq bounds its queues in messages, and an answer may have 8 MiB. It must never count what the kernel has taken: a
message counts until libzmq has let go of its last frame.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import zmq

from shared.rpc.sender import Account, Sender

SERVICE_BYTES = 64 << 20
"""One service may leave so much unread; an answer to who has read all it got is always kept."""
GUEST_BYTES = 16 << 20
"""The same of a connection of an observer or operator."""
GUESTS_BYTES = 64 << 20
"""All of those together. What one connection, its account and all of them hold, added up, stays within it too with the
next answer: so an account, however many connections it opens, has about half of what the others leave, and whoever
comes next finds room."""
SMALL_BYTES = 16 << 10
"""Answers to services up to this size are left to the bound in messages: counting one costs 45 microseconds."""
MESSAGE_BYTES = 512
"""What a message takes besides its frames."""


@dataclass(slots=True)
class _Peer:
    account: Account | None
    """None: a service, which is counted by itself."""
    nbytes: int = 0
    waiting: deque[tuple[int, zmq.MessageTracker]] = field(default_factory=deque)
    """In the order sent, which is the order in which libzmq lets go of them."""


class Unread:
    """Of one socket."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._guests: Counter[Account] = Counter()
        """Bytes by account."""
        self._guests_bytes = 0
        self._look_at = 64
        """So many peers with something unread make it time to forget those that are gone."""

    def counts(self, sender: Sender, nbytes: int) -> bool:
        """Whether an answer of that size to it is to be counted."""
        return sender.is_guest or nbytes > SMALL_BYTES

    def takes(self, sender: Sender, nbytes: int) -> bool:
        """Whether an answer may be sent to it. False: too much waits for it."""
        known = self._peers.get(sender.peer)
        if known is not None:
            self._read(sender.peer, known)
        held = known.nbytes if known is not None else 0
        total = held + nbytes + MESSAGE_BYTES
        if sender.is_guest and not self._guests_take(sender.account, total):
            self._look()
            if not self._guests_take(sender.account, total):
                return False
        return not held or total <= (GUEST_BYTES if sender.is_guest else SERVICE_BYTES)

    def sent(self, sender: Sender, nbytes: int, tracker: zmq.MessageTracker) -> None:
        """An answer is on its way; `tracker`: of its last frame."""
        known = self._peers.get(sender.peer)
        if known is None:
            known = self._peers[sender.peer] = _Peer(sender.account if sender.is_guest else None)
        known.waiting.append((nbytes + MESSAGE_BYTES, tracker))
        self._add(known, nbytes + MESSAGE_BYTES)
        if len(self._peers) > self._look_at:
            self._look()
            self._look_at = 64 + 2 * len(self._peers)

    def _guests_take(self, account: Account, nbytes: int) -> bool:
        return nbytes + self._guests[account] + self._guests_bytes <= GUESTS_BYTES

    def _add(self, known: _Peer, nbytes: int) -> None:
        known.nbytes += nbytes
        if known.account is not None:
            self._guests[known.account] += nbytes
            self._guests_bytes += nbytes
            if not self._guests[known.account]:
                del self._guests[known.account]

    def _look(self) -> None:
        for peer, known in list(self._peers.items()):
            self._read(peer, known)

    def _read(self, peer: bytes, known: _Peer) -> None:
        waiting = known.waiting
        while waiting and waiting[0][1].done:
            self._add(known, -waiting.popleft()[0])
        if not waiting:
            del self._peers[peer]
