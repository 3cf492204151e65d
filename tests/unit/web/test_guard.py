"""Tests, without a socket, which requests reach the page's application."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from services.web.application import Guard
from shared.guest_server import Secret

TOKEN = "a-token-of-24-characters"
GUARD = Guard(PlainTextResponse("reached"), Secret(TOKEN))
OPEN = Guard(PlainTextResponse("reached"), None)


def status_of(guard: Guard, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Return the status of a response and its headers."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in {"host": "127.0.0.1:8080", **headers}.items()]
    asyncio.run(guard({"type": "http", "path": path, "headers": pairs}, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "10.0.0.1", "[::1]:8080", "localhost:9", socket.gethostname()])
def test_requests_to_addresses_and_names_of_this_machine_are_admitted(host: str) -> None:
    assert status_of(OPEN, "/", host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8080", "localhost.evil.example", "", "[x]:1"])
def test_names_of_other_hosts_are_refused(host: str) -> None:
    assert status_of(OPEN, "/", host=host)[0] == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:8080", 200), ("http://127.0.0.1:8081", 403), ("https://evil.example", 403), ("null", 403)],
)
def test_requests_from_other_origins_are_refused(origin: str, status: int) -> None:
    assert status_of(OPEN, "/api/operate", origin=origin)[0] == status


@pytest.mark.parametrize(
    ("given", "status"),
    [(f"Bearer {TOKEN}", 200), (f"Bearer {TOKEN}x", 401), (f"Basic {TOKEN}", 401), ("Bearer ", 401), ("", 401)],
)
def test_data_needs_the_token_if_one_is_set(given: str, status: int) -> None:
    assert status_of(GUARD, "/api/metrics", authorization=given)[0] == status
    assert status_of(GUARD, "/page.js", authorization=given)[0] == 200


def test_every_response_has_a_strict_content_security_policy() -> None:
    for path, headers in (("/", {}), ("/api/metrics", {}), ("/", {"host": "evil.example"})):
        policy = status_of(GUARD, path, **headers)[1]["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
