"""Decides which requests reach the application, and adds headers that restrict the page in the browser."""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.guest_server import Secret, prove

API = "/api/"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Refuses unknown host names, requests from other sites, and, if there is a token, requests for data without it.

    Tokens are sent in headers that no other site can make a browser send, and never in cookies or addresses. The page
    itself contains no data and needs no token.
    """

    def __init__(self, application: ASGIApp, token: Secret | None) -> None:
        self._application = application
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(scope, Headers(scope=scope))
        answer = self._application if refused is None else PlainTextResponse(refused[1], refused[0])
        await answer(scope, receive, send_confined)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Return the HTTP status and the reason for refusing a request, or None if the request is admitted."""
        host = headers.get("host", "")
        if not self._is_own_name(host):
            return 421, f"{host[:100]!r} is not a name of this page; use its IP address or {', '.join(self._names)}"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "this page answers its own requests only"
        if scope["path"].startswith(API) and self._token is not None:
            if not self._token.is_borne_by(headers.get("authorization", "")):
                return 401, "the token is missing or wrong"
            prove(scope)
        return None

    def _is_own_name(self, host: str) -> bool:
        """Return whether `host` is an IP address or a name of this machine.

        If other names were accepted, a site whose name resolves to this address (DNS rebinding) could read the
        responses.
        """
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True
