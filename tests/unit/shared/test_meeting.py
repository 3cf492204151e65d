"""Tests which interface and which address the ranks use for their rendezvous."""

from __future__ import annotations

import pytest

from shared.ranks.meeting import announced_address, interface_of
from shared.rpc.errors import RpcError


def test_the_interface_is_the_one_that_has_the_announced_address() -> None:
    assert interface_of(announced_address("tcp://127.0.0.1:0")) == "lo"
    assert announced_address("tcp://localhost:7747") == "127.0.0.1"


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        ("", "this process does not answer other hosts"),
        ("tcp://192.0.2.1:0", "no network interface of this host has the address 192.0.2.1; give each"),
        ("tcp://no-such-host.invalid:0", "no-such-host.invalid has no address"),
    ],
)
def test_an_announced_address_that_this_host_does_not_have_is_refused(listen: str, text: str) -> None:
    with pytest.raises(RpcError, match=text):
        interface_of(announced_address(listen))
