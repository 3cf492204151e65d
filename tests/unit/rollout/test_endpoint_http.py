"""Tests the endpoint with HTTP requests that no OpenAI client makes, sent over plain sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog

from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from shared.openai_api import requests

CHAT = b'{"messages": [{"role": "user", "content": "1"}]}'


class _Fails:
    """Calls of a sample whose engine has failed."""

    temperature = 1.0

    async def chat(self, *_: Any, **__: Any) -> Any:
        raise ValueError("the engine broke")


class _Waits:
    """Calls of a sample whose engine never finishes."""

    temperature = 1.0

    def __init__(self) -> None:
        self.under_way = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def chat(self, *_: Any, **__: Any) -> Any:
        self.under_way.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def ask(*requests: tuple[str, str, bytes]) -> list[tuple[int, dict[str, Any]]]:
    """Send a request for each (method, path below the base URL, body) on one connection; return the statuses and
    errors."""

    async def scenario() -> list[tuple[int, dict[str, Any]]]:
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        answers = []
        try:
            _, _, address, base = endpoint.open(_Fails()).split("/", 3)  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection(*address.split(":"))
            for method, path, body in requests:
                writer.write(
                    f"{method} /{base}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                )
                writer.write(body)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                answers.append((int(head.split()[1]), json.loads(await reader.readexactly(length))["error"]))
            writer.close()
        finally:
            await endpoint.stop()
        return answers

    return asyncio.run(scenario())


def test_a_request_over_the_size_limit_is_refused_and_the_connection_stays_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "BODY_LIMIT_BYTES", 1 << 20)
    (large, at_limit, small) = ask(
        ("POST", "/chat/completions", b" " * (4 << 20)),
        ("POST", "/chat/completions", b" " * (1 << 20)),
        ("POST", "/chat/completions", b"{}"),
    )
    assert large[0] == 413
    assert large[1]["message"] == "the request exceeds 1048576 bytes"
    assert large[1]["type"] == "invalid_request_error"
    assert "not valid JSON" in at_limit[1]["message"]
    assert small[1]["message"] == "the request has no list of messages"


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("GET", "/chat/completions", "no GET chat/completions: only POST"),
        ("POST", "/models", "no POST models: only POST"),
        ("POST", "/models/", "no POST models/: only POST"),
        ("DELETE", "/embeddings", "no DELETE embeddings: only POST"),
        ("GET", "0/models", "no running sample has this address"),
    ],
)
def test_other_routes_are_answered_with_not_found_and_their_name(method: str, path: str, says: str) -> None:
    ((status, error),) = ask((method, path, b""))
    assert status == 404
    assert says in error["message"]


def test_a_failed_call_is_a_server_error_that_names_only_its_kind() -> None:
    with structlog.testing.capture_logs() as logged:
        ((status, error),) = ask(("POST", "/chat/completions", CHAT))
    assert (status, error["type"]) == (500, "server_error")
    assert [str(each["exc_info"]) for each in logged] == ["the engine broke"]
    assert error["message"] == "ValueError; see the log of the rollout service"


@pytest.mark.parametrize("leaves", ["client", "endpoint"])
def test_a_call_ends_when_its_client_disconnects_or_the_endpoint_stops(leaves: str) -> None:
    async def scenario() -> None:
        endpoint = OpenAIEndpoint("m")
        await endpoint.start()
        calls = _Waits()
        _, _, address, base = endpoint.open(calls).split("/", 3)  # type: ignore[arg-type]
        _, writer = await asyncio.open_connection(*address.split(":"))
        head = f"POST /{base}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(CHAT)}\r\n\r\n"
        writer.write(head.encode() + CHAT)
        async with asyncio.timeout(10):
            await calls.under_way.wait()
            if leaves == "client":
                writer.close()
                await calls.cancelled.wait()
            await endpoint.stop()
            assert calls.cancelled.is_set()
        writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "overridden", "told"),
    [
        ({"temperature": 0.7, "top_p": 1, "top_k": -1, "presence_penalty": 0.0}, [], []),
        ({"temperature": 0.7, "seed": 3}, ["seed"], []),
        (
            {"temperature": 0.2, "min_p": 0.1},
            ["temperature", "min_p"],
            ["temperature 0.2 and gets 0.7, min_p 0.1 and gets 0"],
        ),
    ],
)
def test_only_a_setting_that_differs_counts_as_overridden(
    asked: dict[str, Any], overridden: list[str], told: list[str]
) -> None:
    endpoint = OpenAIEndpoint("m")
    assert endpoint._changes(asked, 0.7) == overridden
    texts = [f"an agent asks for {what}: the topology decides how to sample" for what in told]
    assert [trouble.text for trouble in endpoint.troubles()] == texts
