"""Tests when an agent kills the processes of its host, on a virtual clock."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from launch.host import HostLink
from launch.processes.plan import SUPERVISOR
from proto.messages import ErrorCode, HostOrders
from shared.rpc.errors import RpcError
from shared.security.access import Access
from tests.sim.clock import VirtualLoop
from tests.unit.shared.rpc.rpc_actors import keyring

UNANSWERED = RpcError(ErrorCode.DEADLINE, "no answer")


class Home:
    """Answers the reports of an agent: with orders, or with an error from `silent_from` on, in seconds."""

    def __init__(self, error: RpcError, silent_from: float) -> None:
        self._error = error
        self._silent_from = silent_from

    async def call(self, *_: object, **__: object) -> HostOrders:
        if asyncio.get_running_loop().time() >= self._silent_from:
            raise self._error
        return HostOrders(processes=[], ends=False)


class Killed(Exception):
    """The supervisor was told to kill the host's processes."""


def killed(monkeypatch: pytest.MonkeyPatch, error: RpcError, silent_from: float, limit_s: float) -> tuple[float, str]:
    """Follow a run that answers with `error` after `silent_from` seconds. Return the time and cause of the kill.

    Raises TimeoutError if nothing was killed within `limit_s` seconds.
    """
    loop = VirtualLoop(Random(0))
    began = loop.time()

    def kill(cause: str) -> None:
        raise Killed(cause)

    supervisor: Any = SimpleNamespace(
        kill=kill, sockets=SimpleNamespace(door=""), views=SimpleNamespace(rows=lambda: [])
    )

    async def scene() -> tuple[float, str]:
        monkeypatch.setattr("launch.host.Client", lambda *_, **__: Home(error, began + silent_from))
        link = HostLink(Access("run", keyring(), {SUPERVISOR: "tcp://127.0.0.1:9"}), "b")
        try:
            await asyncio.wait_for(link.follow(supervisor), limit_s)
        except Killed as cause:
            assert link.given_up is (error.code == ErrorCode.LOST)
            return loop.time() - began, str(cause)
        raise AssertionError("follow returned")

    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(scene())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_an_agent_without_an_answer_for_a_minute_kills_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    at, cause = killed(monkeypatch, UNANSWERED, 100.5, 200.0)
    assert 160 < at < 162  # the last answer came at 100 s
    assert cause == "the run has not answered for 60 s: no answer"
    with pytest.raises(TimeoutError):
        killed(monkeypatch, UNANSWERED, 100.5, 160.0)


def test_an_agent_that_is_told_that_its_host_was_lost_kills_its_processes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, cause = killed(monkeypatch, RpcError(ErrorCode.LOST, "host b was given up"), 100.5, 200.0)
    assert 100 < at < 102
    assert "given up" in cause
