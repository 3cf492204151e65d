"""Two network namespaces that tests use as two hosts. One link joins them."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
        pytest.skip(f"network namespaces cannot be created: {made.stderr.decode().strip()}")
    _ip("netns", "del", name)


class SlowLine:
    """A link between two hosts that delivers every packet `delay_s` seconds late: two TUN devices and a thread."""

    def __init__(self, names: Sequence[str], delay_s: float) -> None:
        self.packets = 0
        self._delay_s = delay_s
        self._ends = [_tun(name) for name in names]
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._deliver, name="slow line")
        self._thread.start()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        for descriptor in (*self._ends, self._stop):
            os.close(descriptor)

    def _deliver(self) -> None:
        there = dict(zip(self._ends, reversed(self._ends), strict=True))
        late: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait_s = max(late[0][0] - time.monotonic(), 0.0) if late else None
            readable, _, _ = select.select([self._stop, *self._ends], [], [], wait_s)
            if self._stop in readable:
                return
            for end in readable:
                late.append((time.monotonic() + self._delay_s, there[end], os.read(end, 1 << 16)))
            while late and late[0][0] <= time.monotonic():
                _, end, packet = late.popleft()
                with suppress(OSError):  # the other end is down
                    os.write(end, packet)
                    self.packets += 1


def _tun(name: str) -> int:
    """Create a TUN device. It exists until the returned descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    set_name, tun, without_header = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(descriptor, set_name, struct.pack("16sH", name.encode(), tun | without_header))
    return descriptor


@contextmanager
def two_hosts(delay_s: float = 0.0) -> Iterator[Sequence[Host]]:
    """Create two hosts for one test. Every packet between them arrives `delay_s` seconds late."""
    _check()
    number = os.getpid() % 65536
    network = f"10.{200 + number // 16384}.{number // 64 % 256}"
    hosts = [Host(f"rlbus-{side}-{number}", f"{network}.{1 + number % 64 * 2 + side}") for side in (0, 1)]
    ends = [f"rlb{side}-{number}" for side in (0, 1)]
    stack = ExitStack()
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        if delay_s:
            stack.callback(SlowLine(ends, delay_s).close)
        else:
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
        stack.close()
