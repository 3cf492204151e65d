"""Runs uvicorn as a guest of a running event loop.

The server leaves its process's signal handlers and logging alone, and waits for silent clients only until a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HOST = "127.0.0.1"
HEAD_LIMIT_BYTES = 16 << 10
IDLE_S = 600
"""Maximum time, in seconds, between two pieces of a request, and between two requests on a connection."""
STOP_S = 1
"""Maximum time, in seconds, that `stop` waits for requests in progress before it cancels them."""


class GuestServer:
    """One ASGI application on one address. The server belongs to the loop that starts it."""

    def __init__(
        self,
        application: ASGIApp,
        idle_s: int = IDLE_S,
        *,
        listen: tuple[str, int] = (HOST, 0),
        most_connections: int | None = None,
    ) -> None:
        """`listen` is a host and a port; port 0 means any free port.

        Connections beyond `most_connections` receive status 503.
        """
        self._listen = listen
        config = uvicorn.Config(
            application,
            http=_GuestConnection,
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
            limit_concurrency=most_connections,
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

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _GuestConnection(H11Protocol):
    """A connection that is closed if its client is silent for too long while a request is awaited or incomplete.

    uvicorn starts its timer only after a response, and stops it at the next byte.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_silence()

    def handle_events(self) -> None:
        super().handle_events()
        self._bound_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _bound_silence(self) -> None:
        awaited = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
        if awaited and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
