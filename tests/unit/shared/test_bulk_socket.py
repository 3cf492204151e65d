"""Tests the endpoints and the socket files of bulk connections."""

from __future__ import annotations

import pytest

from proto.errors import WireError
from shared.dataplane.bulk_connection import connect, listen


def test_endpoints_are_tcp_or_ipc_and_a_stale_socket_file_is_replaced(tmp_path: object) -> None:
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
