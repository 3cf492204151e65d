"""In the section `transport`, no key is silently ignored, and none is unsafe by default."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launch.checks import preflight
from launch.processes.plan import listen_endpoint
from shared.topology import load
from tests.unit.shared.topology.small_topology import BASE, problems, write


def with_transport(folder: Path, text: str) -> Path:
    return write(folder, f"{BASE}transport: {text}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{listn: 10.0.0.1}", "t.yaml:28: transport.listn: unknown key, nearest valid key 'listen'"),
        ("{listen: 10.0.0.1, keys: none}", "t.yaml:28: transport.keys: unknown key"),
        ("{listen: 10.0.0.1, curve: false}", "t.yaml:28: transport.curve: unknown key"),
        ("{listen: 10.0.0.1, encrypt: false}", "t.yaml:28: transport.encrypt: unknown key"),
        ("{encrypt_bulk: false}", "t.yaml:28: transport.encrypt_bulk: false: without transport.listen"),
        ("{scheduler_port: 7000}", "t.yaml:28: transport.scheduler_port: without transport.listen, no process listens"),
        (
            "{supervisor_port: 7000}",
            "t.yaml:28: transport.supervisor_port: without transport.listen, no process listens",
        ),
        ("{monitor_port: 7000}", "t.yaml:28: transport.monitor_port: without transport.listen, no process listens"),
        (
            "{listen: 10.0.0.1, monitor_port: 7747}",
            "t.yaml:28: transport.monitor_port: 7747 is transport.scheduler_port too; choose another",
        ),
        ("{listen: 10.0.0.1, supervisor_port: 0}", "t.yaml:28: transport.supervisor_port: "),
        ("{listen: 10.0.0.1, supervisor_port: 65536}", "t.yaml:28: transport.supervisor_port: "),
        ('{listen: "*"}', "t.yaml:28: transport.listen: "),
        ('{listen: "tcp://10.0.0.1:1"}', "t.yaml:28: transport.listen: "),
        ('{listen: "0.0.0.0"}', "t.yaml:28: transport.listen: "),
    ],
)
def test_transport_key_that_is_wrong_or_without_effect_is_reported_with_its_line(
    folder: Path, text: str, line: str
) -> None:
    [found] = problems(with_transport(folder, text))
    assert found.startswith(line)


def test_bulk_data_is_unencrypted_only_if_its_own_key_says_so(folder: Path) -> None:
    assert load(with_transport(folder, "{listen: 10.0.0.1}")).transport.encrypt_bulk
    assert not load(with_transport(folder, "{listen: 10.0.0.1, encrypt_bulk: false}")).transport.encrypt_bulk


def test_only_services_that_others_contact_first_have_fixed_ports(folder: Path) -> None:
    transport = load(with_transport(folder, "{listen: 10.0.0.1, supervisor_port: 9}")).transport
    assert listen_endpoint(transport, "scheduler") == "tcp://10.0.0.1:7747"
    assert listen_endpoint(transport, "supervisor") == "tcp://10.0.0.1:9"
    assert listen_endpoint(transport, "monitor") == "tcp://10.0.0.1:7749"
    assert listen_endpoint(transport, "rollout") == "tcp://10.0.0.1:0"
    assert listen_endpoint(load(write(folder)).transport, "scheduler") == ""


def test_address_of_another_machine_and_port_in_use_are_reported_before_the_start(folder: Path) -> None:
    away = load(with_transport(folder, "{listen: 192.0.2.1}"))  # This address is reserved for documentation.
    [line] = preflight.check(away, "t.yaml").errors
    assert line.startswith("t.yaml: transport.listen: 192.0.2.1 cannot be used (Cannot assign requested address)")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mine = load(with_transport(folder, f"{{listen: 127.0.0.1, monitor_port: {port}}}"))
        assert f"t.yaml: transport.monitor_port: {port} cannot be used (Address already in use); choose another" in (
            preflight.check(mine, "t.yaml").errors
        )
