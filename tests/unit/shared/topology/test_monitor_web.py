"""Tests the section `monitor.web`: a page that other hosts can reach needs a token, and token files are private."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launch.checks import preflight
from shared.topology import load
from tests.unit.shared.topology.small_topology import problems, write


def token_file(folder: Path, name: str, text: str = "a-token-of-24-characters", mode: int = 0o600) -> Path:
    path = folder / name
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return path


def token_problems(folder: Path, **files: Path) -> list[str]:
    settings = [f"monitor.web.{key}={path}" for key, path in files.items()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = preflight.check(load(write(folder), [f"monitor.web.listen=127.0.0.1:{port}", *settings]), "t.yaml")
    return found.errors


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "10.0.0.1:8080", "[::]:8080", "myhost:8080"])
def test_an_address_that_other_hosts_can_reach_is_refused_with_a_one_line_error_unless_a_token_is_set(
    folder: Path, address: str
) -> None:
    [line] = problems(write(folder), f'monitor.web.listen="{address}"')
    assert f"monitor.web.listen: {address}: others reach this address, and monitor.web.token is not set" in line
    assert line.endswith("or listen on 127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"])
def test_a_loopback_address_needs_no_token_and_adds_the_web_service_to_the_plan(folder: Path, address: str) -> None:
    topology = load(write(folder), [f'monitor.web.listen="{address}"'])
    assert [spec.name for spec in topology.services_plan()].count("web/0") == 1
    assert "web/0" not in [spec.name for spec in load(write(folder)).services_plan()]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", ":8080", "127.0.0.1:http"])
def test_an_address_without_a_usable_port_is_refused_with_a_one_line_error(folder: Path, address: str) -> None:
    [line] = problems(write(folder), f'monitor.web.listen="{address}"')
    assert "monitor.web.listen" in line
    assert repr(address) in line


def test_token_files_that_are_missing_short_or_readable_by_others_are_refused_before_the_start(folder: Path) -> None:
    [missing] = token_problems(folder, token=folder / "nowhere")
    assert "monitor.web.token" in missing
    assert "No such file or directory; write a token into a file" in missing
    [short] = token_problems(folder, token=token_file(folder, "short", "12345"))
    assert "5 characters; it must be one ASCII word of 16 or more" in short
    [open_to_all] = token_problems(folder, operator_token=token_file(folder, "open", mode=0o644))
    assert "monitor.web.operator_token" in open_to_all
    assert "others may read it (mode 0644); run chmod 600" in open_to_all


def test_the_operator_token_must_differ_from_the_visitors_token(folder: Path) -> None:
    same = {"token": token_file(folder, "one"), "operator_token": token_file(folder, "two")}
    [line] = token_problems(folder, **same)
    assert "monitor.web.operator_token" in line
    assert "the same token as monitor.web.token; make another" in line
    same["operator_token"] = token_file(folder, "two", "another-token-of-some-length")
    assert token_problems(folder, **same) == []


def test_the_resolved_topology_contains_the_path_of_the_token_file_and_not_the_token(folder: Path) -> None:
    path = token_file(folder, "secret")
    text = load(write(folder), [f"monitor.web.token={path}"]).to_yaml()
    assert str(path) in text
    assert "a-token-of-24-characters" not in text


def test_a_port_in_use_is_found_before_the_start(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        topology = load(write(folder), [f"monitor.web.listen=127.0.0.1:{port}"])
        [line] = preflight.check(topology, "t.yaml").errors
    expected = f"monitor.web.listen: {port} cannot be used (Address already in use); choose another"
    assert line == f"t.yaml: {expected}"
