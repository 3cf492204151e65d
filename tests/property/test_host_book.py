"""Tests that hosts can join, be lost and return in any order: no process runs twice, and no GPU is assigned twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.placement.book import HostBook, HostState
from proto.messages import HostReport
from shared.rpc.errors import RpcError
from shared.topology import Topology, load
from tests.unit.shared.topology.small_topology import BASE, make, write

HOSTS = {"b": 4, "c": 2, "d": 2}
PLACES = [
    f"placement.hosts={{{', '.join(f'{name}: {{gpus: {gpus}}}' for name, gpus in HOSTS.items())}}}",
    "services.rollout={host: [b, c], instances: 2, gpus: 2, engine: vllm, parallel: {tp: 2}}",
    "services.reference={host: b, gpus: 2, backend: megatron, parallel: {tp: 2}}",
    "transport.listen=10.0.0.1",
]
PROCESSES = {("rollout", 0), ("rollout", 1), ("reference", 0), ("reference", 1)}


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    folder: Path = make(tmp_path_factory.mktemp("book"))
    return load(write(folder, BASE), PLACES)


@given(events=st.lists(st.tuples(st.sampled_from(["join", "lose"]), st.sampled_from(sorted(HOSTS))), max_size=25))
def test_every_process_has_exactly_one_place_whatever_happens_to_the_hosts(
    topology: Topology, events: list[tuple[str, str]]
) -> None:
    book = HostBook(topology)
    lives = dict.fromkeys(HOSTS, 0)
    stores: set[tuple[str, tuple[str, int]]] = set()
    for at, (kind, name) in enumerate(events):
        if kind == "lose":
            book.lose(name, "test", float(at))
        else:
            lives[name] += book.hosts[name].state != HostState.JOINED
        seen: dict[tuple[str, int], str] = {}
        for host in [name] if kind == "join" else []:
            book.report(report(host, lives[host]), float(at))
        for host, life in lives.items():
            if book.hosts[host].state != HostState.JOINED:
                continue
            orders, _ = book.report(report(host, life), float(at))
            gpus = [gpu for each in orders.processes for gpu in each.gpus]
            assert len(gpus) == len(set(gpus))
            assert all(gpu < HOSTS[host] for gpu in gpus)
            for each in orders.processes:
                assert seen.setdefault((each.service, each.instance), host) == host
            stores.add((f"{host}/{life}", book.hosts[host].store))
        assert set(book.keys()) - {host.store for host in book.hosts.values()} == PROCESSES
        assert ({key[1] for key in seen if key[0] == "reference"}) in ({0, 1}, set())  # The ranks stay together.
        free = {host: HOSTS[host] for host in HOSTS if book.hosts[host].state == HostState.JOINED}
        for key, host in seen.items():
            free[host] -= 2 if key[0] == "rollout" else 1 if key[0] == "reference" else 0
        lost = {host for host in HOSTS if book.hosts[host].state == HostState.LOST}
        homeless = {key for key in PROCESSES if key not in seen and _host(book, key) in lost}
        assert not homeless or max(free.values(), default=0) < 2
    assert len({store for _, store in stores}) == len(stores)  # No two lives use the same store number.


def _host(book: HostBook, key: tuple[str, int]) -> str:
    found = book.host_of(key)
    assert found is not None
    return found.name


def report(host: str, life: int) -> HostReport:
    return HostReport(host=host, incarnation=life, endpoint="", gpus=HOSTS[host], processes=[])


def test_an_agent_that_was_considered_lost_is_never_accepted_again(topology: Topology) -> None:
    book = HostBook(topology)
    book.report(report("b", 1), 0.0)
    book.lose("b", "test", 1.0)
    book.report(report("b", 2), 2.0)
    book.lose("b", "test", 3.0)
    for life in (1, 2):
        with pytest.raises(RpcError, match="considered lost"):
            book.report(report("b", life), 4.0)
