"""Two hosts on one machine, for tests: network namespaces joined by one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.unavailable import unavailable

STORE_ADDRESS, READER_ADDRESS = "10.203.77.1", "10.203.77.2"
OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
"""`ip netns exec` gives a process mounts of its own; this makes its shared memory its own too."""


def inside(host: str) -> list[str]:
    """What to put before a command."""
    return ["ip", "netns", "exec", host]


def with_own_memory(host: str) -> list[str]:
    """The same, and it shares no memory with other hosts."""
    return [*inside(host), "sh", "-c", OWN_MEMORY, "host"]


def command(*words: str) -> str:
    """Run it; returns what it prints."""
    return subprocess.run(words, check=True, capture_output=True, timeout=10, text=True).stdout


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, joined by one line."""

    store: str
    reader: str

    def firewall(self, action: str, *rule: str) -> None:
        """On both ends, for what comes in."""
        for host in (self.store, self.reader):
            command(*inside(host), "iptables", action, "INPUT", *rule)

    def lose_packets(self, share: float) -> None:
        """Of a hundred, `100 * share` do not arrive, at either end."""
        self.firewall("-A", "-m", "statistic", "--mode", "random", "--probability", f"{share}", "-j", "DROP")

    def lost(self) -> int:
        """Packets that did not arrive."""
        listings = [command(*inside(host), "iptables", "-nvxL", "INPUT") for host in (self.store, self.reader)]
        return sum(int(count) for text in listings for count in re.findall(r"^\s*(\d+)\s+\d+\s+DROP", text, re.M))


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Made for one test."""
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            unavailable(f"{tool} is not installed (apt package {'iproute2' if tool == 'ip' else tool})")
    made = Hosts(f"rlbus-s{os.getpid()}", f"rlbus-r{os.getpid()}")
    try:
        try:
            for host in (made.store, made.reader):
                command("ip", "netns", "add", host)
            command("ip", "-n", made.store, "link", "add", "rlb0", "type", "veth", "peer", "name", "rlb1")
            command("ip", "-n", made.store, "link", "set", "rlb1", "netns", made.reader)
            for host, link, address in ((made.store, "rlb0", STORE_ADDRESS), (made.reader, "rlb1", READER_ADDRESS)):
                command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", link)
                for each in (link, "lo"):
                    command("ip", "-n", host, "link", "set", each, "up")
            made.firewall("-A", "-i", "lo", "-j", "ACCEPT")
        except subprocess.CalledProcessError as error:
            unavailable(f"network namespaces are not permitted here: {error.cmd}: {error.stderr.strip()}")
        yield made
    finally:
        for host in (made.store, made.reader):
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", host)
