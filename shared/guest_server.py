"""Runs uvicorn as a guest of a running event loop.

The server leaves its process's signal handlers and logging alone. Every wait for a client has a deadline, and strangers
cannot take the places of clients that the application has recognised (`prove`). A `Secret` recognises a client by its
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Generator
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.os_limits import raise_descriptor_limit
from shared.places import Place, Places

HOST = "127.0.0.1"
HEAD_LIMIT_BYTES = 16 << 10
ARRIVAL_S = 20.0
"""Maximum time, in seconds, from the first byte of a request, or from the start of the connection, until the whole
request has arrived."""
IDLE_S = 600
"""Maximum time, in seconds, between the end of a response and the next request. Within this time the client must also
have read the response."""
STOP_S = 1
"""Maximum time, in seconds, that `stop` waits for requests in progress before it cancels them."""
MOST_CONNECTIONS, DESCRIPTOR_SHARE = 4096, 4
"""Maximum number of connections. The descriptor limit divided by `DESCRIPTOR_SHARE` is a second maximum."""
BACKLOG, ACCEPTED_AT_ONCE = 1024, 16
"""Maximum number of connections that wait to be accepted, and that are accepted in one iteration of the event loop. An
accepted connection has a descriptor for a few iterations before it gets a place or ends."""
LOGGED_REFUSALS = 20
_FULL = b"every place is taken by a request in progress; try again later\n"
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)
_PLACE = "place"


def prove(scope: Scope) -> None:
    """Record that the peer of this request is no stranger, for example because its token is right.

    Its connection is then displaced only after those of all strangers, and never during a request.
    """
    place = scope.get("state", {}).get(_PLACE)
    if isinstance(place, Place):
        place.proven = True


class GuestServer:
    """One ASGI application on one address. The server belongs to the loop that starts it."""

    def __init__(
        self,
        application: ASGIApp,
        idle_s: int = IDLE_S,
        *,
        listen: tuple[str, int] = (HOST, 0),
        most_connections: int = MOST_CONNECTIONS,
        arrival_s: float = ARRIVAL_S,
    ) -> None:
        """`listen` is a host and a port; port 0 means any free port.

        A connection beyond `most_connections` displaces one without a request in progress (see `Places`). If there is
        none, it receives status 503.
        """
        self._listen = listen
        most = max(1, min(most_connections, raise_descriptor_limit() // DESCRIPTOR_SHARE))
        self._admission = _Admission(Places(most), arrival_s)
        connection: Any = functools.partial(_GuestConnection, self._admission)
        config = uvicorn.Config(
            application,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL + 1,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=idle_s,
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=HEAD_LIMIT_BYTES,
            backlog=ACCEPTED_AT_ONCE,
        )
        self._server = _Guest(config)
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """Host and port; empty before `start`."""

    async def start(self) -> None:
        """Bind the port, so that `address` is valid and clients can connect when this returns. Raises OSError."""
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio disables Nagle's algorithm, which delays responses by 40 ms, only on sockets whose protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            listener.close()
            raise
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{shown}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        """Close every connection. Requests in progress receive `http.disconnect` and have STOP_S seconds to finish."""
        if self._serving is None:
            return
        self._server.should_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._serving


class _Guest(uvicorn.Server):
    """A server that leaves signals to its process."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has one parameter for the queue and for what it accepts at once

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Admission:
    """The connections of one server, by place."""

    def __init__(self, places: Places, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self._places = places
        self._held: dict[Place, _GuestConnection] = {}
        self._log = structlog.get_logger("http")

    def admit(self, connection: _GuestConnection, address: str, now: float) -> Place | None:
        """Return a place for a new connection, or None if there is none. The connection whose place it takes ends."""
        place, victim = self._places.take(address, now)
        if victim is not None:
            self._held.pop(victim).transport.abort()
        if place is not None:
            self._held[place] = connection
        elif self._places.turned_away <= LOGGED_REFUSALS:
            self._log.warning("connection refused: too many requests in progress", limit=self._places.most)
        return place

    def leave(self, place: Place) -> None:
        """Free the place of a connection that has ended."""
        self._places.leave(place)
        self._held.pop(place, None)


class _GuestConnection(H11Protocol):
    """A connection that ends if its client takes too long to send a request or to read a response.

    uvicorn's own timer starts only after a response, and every byte stops it.
    """

    def __init__(self, admission: _Admission, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._admission = admission
        self._place: Place | None = None
        self._deadline: asyncio.TimerHandle | None = None
        """Ends the connection, or None while a whole request is being answered."""
        self._is_idle = False
        """Whether the deadline is the one for the next request to begin."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self._place = self._admission.admit(self, address, self.loop.time())
        if self._place is None:
            transport.write(_REFUSAL)
            transport.close()
            return
        self.app_state = {**self.app_state, _PLACE: self._place}
        self._end_after(self._admission.arrival_s)

    def data_received(self, data: bytes) -> None:
        if self._is_idle:  # a request begins, and more bytes do not extend its time
            self._is_idle = False
            self._end_after(self._admission.arrival_s)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._note_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel_deadline()
        if self._place is not None:
            self._admission.leave(self._place)

    def _note_progress(self) -> None:
        """Set the deadline after a response, and remove it once a request has arrived."""
        awaits = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
        if self._place is not None:
            self._place.in_use = not awaits
        if not awaits:
            self._cancel_deadline()
        elif self._deadline is None:
            self._is_idle = True
            self._end_after(self.timeout_keep_alive)

    def _end_after(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Secret:
    """A token that is compared in constant time."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def matches(self, given: str) -> bool:
        # All digests have the same length, so the comparison does not reveal the length of the token.
        return hmac.compare_digest(hashlib.sha256(given.encode()).digest(), self._digest)

    def is_borne_by(self, authorization: str) -> bool:
        """Return whether the header `authorization` is a bearer token that matches (RFC 6750)."""
        kind, _, given = authorization.partition(" ")
        return kind.lower() == "bearer" and self.matches(given)


class OwnNames:
    """The names under which a server on this machine is addressed: its IP addresses and its host names.

    If other names were accepted, a site whose name resolves to this address (DNS rebinding) could read responses.
    """

    def __init__(self) -> None:
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    def refusal(self, host: str) -> str:
        """Return why a request with this header `host` is refused (with status 421), or an empty string."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if name.lower() not in self._names:
                return f"{host[:100]!r} is not a name of this server; use its IP address or {', '.join(self._names)}"
        return ""
