"""The check of keys and host names in front of everything that a server answers."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.policy_trainer.tinker.exchange import KEY, answer
from services.policy_trainer.tinker.keys import ClientKeys
from shared.guest_server import OwnNames, prove

OPEN_PATHS = frozenset({"/api/v1/healthz"})
"""What is answered without a key."""


class KeyGate:
    """Lets requests with a client's key through, with the name of the key. Tinker clients send it as `x-api-key`, and
    OpenAI clients as a bearer token (RFC 6750). Browsers of other sites are refused, because they name their origin."""

    def __init__(self, application: ASGIApp, keys: ClientKeys) -> None:
        self._application = application
        self._keys = keys
        self._names = OwnNames()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refused: tuple[int, str] | None = None
        if why := self._names.refusal(headers.get("host", "")):
            refused = 421, why
        elif "origin" in headers:
            refused = 403, "this server does not answer the pages of browsers"
        elif scope["path"] not in OPEN_PATHS:
            kind, _, token = headers.get("authorization", "").partition(" ")
            given = headers.get("x-api-key") or (token if kind.lower() == "bearer" else "")
            name = self._keys.name_of(given)
            if name is None:
                refused = 401, "the key is missing or wrong; send it as x-api-key or as a bearer token"
            else:
                prove(scope)
                scope = {**scope, "state": {**scope.get("state", {}), KEY: name}}
        if refused is None:
            await self._application(scope, receive, send)
        else:
            await answer({"detail": refused[1]}, refused[0])(scope, receive, send)
