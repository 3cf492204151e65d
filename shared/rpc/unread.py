"""How many bytes of answers wait for peers of other hosts to read them, and for whom no more are kept.

libzmq bounds its queues in messages, and an answer may have 8 MiB. It must never count what the kernel has taken: a
message counts until libzmq has let go of its last frame.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import zmq

from shared.security.roles import Role

SERVICE_BYTES = 64 << 20
"""One service may leave so much unread; an answer to who has read all it got is always kept."""
GUEST_BYTES = 16 << 20
"""The same of an observer or operator."""
GUESTS_BYTES = 64 << 20
"""All of them together, however many connections their keys open."""
SMALL_BYTES = 16 << 10
"""Answers to services up to this size are left to the bound in messages: counting one costs 45 microseconds."""
MESSAGE_BYTES = 512
"""What a message takes besides its frames."""


@dataclass(slots=True)
class _Peer:
    guest: bool
    nbytes: int = 0
    waiting: deque[tuple[int, zmq.MessageTracker]] = field(default_factory=deque)
    """In the order sent, which is the order in which libzmq lets go of them."""


class Unread:
    """Of one socket."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._guests_bytes = 0
        self._look_at = 64
        """So many peers with something unread make it time to forget those that are gone."""

    def counts(self, role: Role, nbytes: int) -> bool:
        """Whether an answer of that size to that role is to be counted."""
        return role < Role.SERVICE or nbytes > SMALL_BYTES

    def takes(self, peer: bytes, role: Role, nbytes: int) -> bool:
        """Whether an answer may be sent to `peer`. False: too much waits for it."""
        if role < Role.SERVICE and self._guests_bytes + nbytes > GUESTS_BYTES:
            self._look()
            if self._guests_bytes + nbytes > GUESTS_BYTES:
                return False
        known = self._peers.get(peer)
        if known is None:
            return True
        self._read(peer, known)
        limit = GUEST_BYTES if known.guest else SERVICE_BYTES
        return not known.nbytes or known.nbytes + nbytes + MESSAGE_BYTES <= limit

    def sent(self, peer: bytes, role: Role, nbytes: int, tracker: zmq.MessageTracker) -> None:
        """An answer is on its way; `tracker`: of its last frame."""
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(role < Role.SERVICE)
        known.waiting.append((nbytes + MESSAGE_BYTES, tracker))
        self._add(known, nbytes + MESSAGE_BYTES)
        if len(self._peers) > self._look_at:
            self._look()
            self._look_at = 64 + 2 * len(self._peers)

    def _add(self, known: _Peer, nbytes: int) -> None:
        known.nbytes += nbytes
        if known.guest:
            self._guests_bytes += nbytes

    def _look(self) -> None:
        for peer, known in list(self._peers.items()):
            self._read(peer, known)

    def _read(self, peer: bytes, known: _Peer) -> None:
        waiting = known.waiting
        while waiting and waiting[0][1].done:
            self._add(known, -waiting.popleft()[0])
        if not waiting:
            del self._peers[peer]
