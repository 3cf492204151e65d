"""Limits the number of bytes in answers that peers on other hosts have not read yet.

libzmq bounds only the number of messages in its queues, and an answer can be 8 MiB long. A message counts until libzmq
has released its last frame; bytes that the kernel has accepted do not count.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import zmq

from shared.rpc.senders import Account, Sender

SERVICE_BYTES = 64 << 20
"""Maximum number of bytes that one service may leave unread. An answer to a peer that has read everything is always
kept."""
GUEST_BYTES = 16 << 20
"""Maximum number of bytes that one connection of an observer or operator may leave unread."""
GUESTS_BYTES = 64 << 20
"""Maximum number of bytes that all observers and operators (the guests) together may leave unread.

Before an answer is sent, three numbers are added up: the unread bytes of its connection, including the answer itself,
those of the connection's account, and those of all guests. The answer is sent only if the sum is within this bound.
However many connections an account opens, it therefore gets only about half of the room that the others leave, so there
is room for a new guest."""
SMALL_BYTES = 16 << 10
"""Answers of up to this size to services are not counted, because counting one costs 45 microseconds. The bound on
the number of messages covers them."""
MESSAGE_BYTES = 512
"""Number of bytes that a message takes up in addition to its frames."""


@dataclass(slots=True)
class _Peer:
    account: Account | None
    """Account of a guest, or None for a service, whose answers count towards its own limit only."""
    nbytes: int = 0
    waiting: deque[tuple[int, zmq.MessageTracker]] = field(default_factory=deque)
    """Messages in the order in which they were sent, which is the order in which libzmq releases them."""


class Unread:
    """The unread answers of one socket."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._guests: Counter[Account] = Counter()
        """Number of unread bytes by account."""
        self._guests_bytes = 0
        self._look_at = 64
        """Number of peers with unread answers above which all peers are checked, so that disconnected ones are
        forgotten."""

    def counts(self, sender: Sender, nbytes: int) -> bool:
        """Return whether an answer of `nbytes` bytes to `sender` must be counted."""
        return sender.is_guest or nbytes > SMALL_BYTES

    def takes(self, sender: Sender, nbytes: int) -> bool:
        """Return whether an answer may be sent: False if too many bytes are waiting for `sender`."""
        peer_state = self._peers.get(sender.peer)
        if peer_state is not None:
            self._read(sender.peer, peer_state)
        unread = peer_state.nbytes if peer_state is not None else 0
        total = unread + nbytes + MESSAGE_BYTES
        if sender.is_guest and not self._guests_take(sender.account, total):
            self._look()
            if not self._guests_take(sender.account, total):
                return False
        return not unread or total <= (GUEST_BYTES if sender.is_guest else SERVICE_BYTES)

    def sent(self, sender: Sender, nbytes: int, tracker: zmq.MessageTracker) -> None:
        """Count an answer that has been sent. `tracker` tracks its last frame."""
        peer_state = self._peers.get(sender.peer)
        if peer_state is None:
            peer_state = self._peers[sender.peer] = _Peer(sender.account if sender.is_guest else None)
        peer_state.waiting.append((nbytes + MESSAGE_BYTES, tracker))
        self._add(peer_state, nbytes + MESSAGE_BYTES)
        if len(self._peers) > self._look_at:
            self._look()
            self._look_at = 64 + 2 * len(self._peers)

    def _guests_take(self, account: Account, nbytes: int) -> bool:
        return nbytes + self._guests[account] + self._guests_bytes <= GUESTS_BYTES

    def _add(self, peer_state: _Peer, nbytes: int) -> None:
        peer_state.nbytes += nbytes
        if peer_state.account is not None:
            self._guests[peer_state.account] += nbytes
            self._guests_bytes += nbytes
            if not self._guests[peer_state.account]:
                del self._guests[peer_state.account]

    def _look(self) -> None:
        for peer, peer_state in list(self._peers.items()):
            self._read(peer, peer_state)

    def _read(self, peer: bytes, peer_state: _Peer) -> None:
        waiting = peer_state.waiting
        while waiting and waiting[0][1].done:
            self._add(peer_state, -waiting.popleft()[0])
        if not waiting:
            del self._peers[peer]
