"""Sockets of bulk connections."""

from __future__ import annotations

import socket
import time

import pytest

from proto.errors import WireError
from shared.dataplane.bulk_socket import connect, listen


def test_wait_for_many_bytes_ends_in_time_with_those_that_came() -> None:
    listener, bound = listen("tcp://127.0.0.1:*")
    line = connect(bound, 0.1)
    listener.setblocking(True)
    peer, _ = listener.accept()
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        line.recv(10, socket.MSG_WAITALL)
    peer.sendall(b"abc")
    assert line.recv(10, socket.MSG_WAITALL) == b"abc"
    assert time.monotonic() - began > 0.2
    for each in (listener, line, peer):
        each.close()


def test_endpoints_are_tcp_or_ipc_and_an_old_socket_file_is_no_obstacle(tmp_path: object) -> None:
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/bulk"):
        for _ in range(2):
            listener, bound = listen(endpoint)
            line = connect(bound, 1.0)
            listener.setblocking(True)
            listener.accept()[0].close()
            line.close()
            listener.close()
    for bad in ("", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:1", "tcp://a:b", "ipc://"):
        with pytest.raises(WireError, match="is expected"):
            connect(bad, 1.0)
