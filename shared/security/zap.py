"""The gate of one ZeroMQ context: the ZAP handler (RFC 27) that decides which keys may connect, and as which role.

It fails closed: an endpoint locked by `shared.security.curve.lock` accepts no peer while no gate answers, and an
unknown key never passes the handshake.
"""

from __future__ import annotations

from collections import Counter

import structlog
import zmq
from zmq.utils import z85

from shared.rpc.transport import Pump
from shared.security.keys import KEY_CHARACTERS, Keyring
from shared.security.roles import Role

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
LOGGED_REFUSALS = 20
"""Maximum number of refusals that are logged individually. All are counted."""


class Gate:
    """The gate of one context. It belongs to the event loop that created it. Create it before the first locked bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keyring) -> None:
        self.keys = keys
        self.admitted: Counter[Role] = Counter()
        self.refused: Counter[str] = Counter()
        """Number of refusals by reason: `unknown_key`, `role`, `mechanism`, `malformed`."""
        self._log = structlog.get_logger("gate")
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        self._pump = Pump(socket, self._on_request)

    def close(self) -> None:
        """Stop admitting peers."""
        self._pump.close()

    def _on_request(self, frames: list[bytes]) -> None:
        if len(frames) < 8 or frames[1] or frames[2] != VERSION:
            self.refused["malformed"] += 1
            return
        peer, _, _, number, domain, address = frames[:6]
        role, reason = self._judge(domain, frames[7], frames[8:])
        if role is not None:
            self.admitted[role] += 1
            answer = [b"200", b"OK", role.label.encode(), b""]
        else:
            self.refused[reason] += 1
            if sum(self.refused.values()) <= LOGGED_REFUSALS:
                self._log.warning("peer refused", reason=reason, address=address.decode("ascii", "replace")[:100])
            answer = [b"400", b"refused", b"", b""]
        self._pump.send([peer, b"", VERSION, number, *answer])

    def _judge(self, domain: bytes, mechanism: bytes, credentials: list[bytes]) -> tuple[Role | None, str]:
        """Return the role of the peer, or None and the reason for the refusal."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None, "mechanism"
        role = self.keys.role_of(_z85(credentials[0]))
        if role is None:
            return None, "unknown_key"
        try:
            admits = Role.of_label(domain.decode("ascii", "replace"))
        except ValueError:
            return None, "role"
        return (role, "") if role >= admits else (None, "role")


def _z85(key: bytes) -> bytes:
    return z85.encode(key) if len(key) * 5 == KEY_CHARACTERS * 4 else b""
