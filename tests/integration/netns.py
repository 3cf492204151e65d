"""Two network namespaces joined by one link, which tests use as two hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the link."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=20)


def _check() -> None:
    """Skip the test if this machine cannot create network namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command (apt package iproute2)")
    name = f"rlbus-try-{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made: {made.stderr.decode().strip()}")
    _ip("netns", "del", name)


@contextmanager
def two_hosts() -> Iterator[Sequence[Host]]:
    """Create two hosts for one test."""
    _check()
    number = os.getpid() % 65536
    network = f"10.{200 + number // 16384}.{number // 64 % 256}"
    hosts = [Host(f"rlbus-{side}-{number}", f"{network}.{1 + number % 64 * 2 + side}") for side in (0, 1)]
    ends = [f"rlb{side}-{number}" for side in (0, 1)]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.namespace, "link", "set", end, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            _ip("netns", "del", host.namespace, check=False)
