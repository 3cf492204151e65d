"""Turns CURVE on and off for the next bind or connect of a socket. ipc never uses it, because its directory is
private."""

from __future__ import annotations

import zmq

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.security.keys import Keyring
from shared.security.roles import Role

TCP = "tcp://"
MAX_PORT = 65_535
_EVERYWHERE = frozenset({"", "*", "0.0.0.0", "[::]"})  # noqa: S104  # refused: no peer can connect to "everywhere"
HANDSHAKE_MS = 10_000
"""Milliseconds after which a peer that has not finished its handshake is disconnected."""


def is_tcp(endpoint: str) -> bool:
    """Return whether other hosts can reach the endpoint, which then needs keys."""
    return endpoint.startswith(TCP)


def check_listen(endpoint: str) -> None:
    """Raise RpcError(bad_request) unless `endpoint` is `tcp://ADDRESS:PORT` with an address that others can reach."""
    address, _, port = endpoint.removeprefix(TCP).rpartition(":")
    if not is_tcp(endpoint) or not port.isdigit() or int(port) > MAX_PORT or address in _EVERYWHERE:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"--listen {endpoint}: must be tcp://ADDRESS:PORT, with an address of this machine that other hosts can "
            "reach (it is announced to them); port 0 picks a free one",
        )


def lock(socket: zmq.Socket[bytes], keys: Keyring, admits: Role) -> None:
    """At the next bind, accept only peers that use CURVE and whose role is at least `admits`.

    Without a `Gate`, accept no peer.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, admits.label.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def unlock(socket: zmq.Socket[bytes], keys: Keyring) -> None:
    """Use CURVE for the next connect, and accept only a server that has the secret key of the run's services."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def clear(socket: zmq.Socket[bytes]) -> None:
    """Do not use CURVE for the next connect."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)
