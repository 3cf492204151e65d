"""Tests what a run answers to the agents of its hosts, over real sockets."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from launch.placement.book import HostBook
from launch.placement.desk import HostDesk
from launch.placement.facts import facts, refusals
from proto.messages import Ack, ErrorCode, HostCheck, HostFacts
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.topology import load
from tests.unit.shared.rpc.rpc_actors import DEADLINE_S, asking, serving
from tests.unit.shared.topology.small_topology import make, write


def answers(folder: Path, checks: list[HostCheck]) -> tuple[list[str], list[str]]:
    """Return the answer to each check ("" if the host may join), and the lines that the user sees."""
    topology = load(write(make(folder)), ["placement.hosts={b: {gpus: 2}}", "transport.listen=10.0.0.1"])
    told: list[str] = []

    async def ask(client: Client, check: HostCheck) -> str:
        try:
            await client.call(check, Ack, deadline_s=DEADLINE_S)
        except RpcError as error:
            return f"{error.code}: {error}"
        return ""

    async def scene() -> list[str]:
        async with serving(f"ipc://{folder}/desk") as (mailbox, bound), asking(bound) as client:
            desk = HostDesk(
                HostBook(topology),
                partial(refusals, topology, facts()),
                mailbox,
                lambda: client,
                lambda name, endpoint: client,
                on_notice=told.append,
                on_unable=lambda cause: None,
            )
            desk.begin()
            try:
                return [await ask(client, check) for check in checks]
            finally:
                await desk.close()

    return asyncio.run(scene()), told


@pytest.fixture(scope="module")
def here() -> HostFacts:
    return msgspec.structs.replace(facts(), gpus=2)


def test_an_agent_that_differs_from_home_is_refused_and_the_user_is_told_once(here: HostFacts, tmp_path: Path) -> None:
    old = HostCheck(host="b", facts=msgspec.structs.replace(here, torch="1.0", clock_s=-100.0))
    good = HostCheck(host="b", facts=here)
    [first, again, last], told = answers(tmp_path, [old, old, good])
    lines = first.removeprefix(f"{ErrorCode.BAD_REQUEST}: ").splitlines()
    assert [line[:10] for line in lines] == ["torch 1.0,", "its clock "]
    assert (again, last) == (first, "")
    assert told == [f"host b is refused: {line}" for line in lines]


def test_an_agent_of_a_host_that_the_run_does_not_have_is_refused(here: HostFacts, tmp_path: Path) -> None:
    [answer], told = answers(tmp_path, [HostCheck(host="x", facts=here)])
    text = answer.removeprefix(f"{ErrorCode.BAD_REQUEST}: ")
    assert text.startswith("host 'x' is not one of the hosts in this run's placement.hosts, which names b; give ")
    assert told == [f"host x is refused: {text}"]
