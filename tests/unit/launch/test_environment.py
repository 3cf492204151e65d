"""Tests the environment of a run's processes."""

from __future__ import annotations

import pytest

from launch.processes.programs import child_environment


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "127.0.0.1,localhost,::1"),
        ("hub.internal", "hub.internal,127.0.0.1,localhost,::1"),
        ("localhost,hub.internal", "localhost,hub.internal,127.0.0.1,::1"),
    ],
)
def test_calls_to_this_machine_go_to_no_proxy(monkeypatch: pytest.MonkeyPatch, given: str, wanted: str) -> None:
    monkeypatch.setenv("NO_PROXY", given)
    monkeypatch.delenv("no_proxy", raising=False)
    environment = child_environment(1)
    assert environment["NO_PROXY"] == wanted
    assert environment["no_proxy"] == "127.0.0.1,localhost,::1"
