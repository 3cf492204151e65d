"""Replies kept for guests that do not read them are bounded in total and leave room for other guests."""

from __future__ import annotations

import threading

import pytest
import zmq

from shared.rpc.senders import Sender
from shared.rpc.unread import GUEST_BYTES, GUESTS_BYTES, SERVICE_BYTES, Unread
from shared.security.roles import Role

ANSWER_BYTES = 200_000


def guest(host: int, connection: int, role: Role = Role.OBSERVER) -> Sender:
    return Sender(0, role, f"{role}-{host}-{connection}".encode(), f"10.0.0.{host}".encode())


def left_unread(unread: Unread, who: Sender, nbytes: int = ANSWER_BYTES) -> int:
    """Send requests, without reading, until a reply is refused; return the number of bytes kept."""
    kept = 0
    while unread.takes(who, nbytes):
        unread.sent(who, nbytes, zmq.MessageTracker(threading.Event()))
        kept += nbytes
    return kept


@pytest.mark.parametrize("connections", [1, 4, 100])
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_guests_that_never_read_leave_room_for_the_next_guest(hosts: int, connections: int) -> None:
    """Each host gets at most half of the room left by earlier hosts, plus the answer that exceeds this half."""
    unread = Unread()
    for host in range(hosts):
        assert max(left_unread(unread, guest(host, connection)) for connection in range(connections)) <= GUEST_BYTES
    for newcomer in (guest(99, 0), guest(0, 0, Role.OPERATOR)):
        assert unread.takes(newcomer, min(GUEST_BYTES, GUESTS_BYTES >> hosts) - 4 * ANSWER_BYTES)
    assert not unread.takes(guest(99, 0), GUESTS_BYTES)


def test_a_service_has_its_own_limit_and_can_get_any_answer_once_it_has_read_all_others() -> None:
    unread = Unread()
    one, other = (Sender(0, Role.SERVICE, name, b"10.0.0.1") for name in (b"one", b"other"))
    assert SERVICE_BYTES - 2 * ANSWER_BYTES < left_unread(unread, one) <= SERVICE_BYTES
    assert unread.takes(other, SERVICE_BYTES)
    read = threading.Event()
    unread.sent(other, SERVICE_BYTES, zmq.MessageTracker(read))
    assert not unread.takes(other, ANSWER_BYTES)
    read.set()
    assert unread.takes(other, SERVICE_BYTES)
