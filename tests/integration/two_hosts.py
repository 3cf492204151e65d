"""Two hosts on one machine for tests: network namespaces joined by one link."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

STORE_ADDRESS, READER_ADDRESS = "10.203.77.1", "10.203.77.2"
OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
"""Shell script that gives a process its own shared memory. `ip netns exec` has already given it its own mount
namespace."""


def inside(host: str) -> list[str]:
    """Return the prefix that runs a command on `host`."""
    return ["ip", "netns", "exec", host]


def with_own_memory(host: str) -> list[str]:
    """Return the prefix that runs a command on `host` without memory shared with other hosts."""
    return [*inside(host), "sh", "-c", OWN_MEMORY, "host"]


def command(*words: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(words, check=True, capture_output=True, timeout=10, text=True).stdout


@dataclass(frozen=True)
class Hosts:
    """Two namespaces joined by one link, which may contain a switch."""

    store: str
    reader: str
    switch: str = ""

    def queue_in_the_switch(self, bytes_per_s: int, queue_bytes: int) -> None:
        """Shape the link towards the reader; packets that find the queue full are lost.

        A queue on the store's host would make senders wait without loss, so the first stream would keep the link to
        itself.
        """
        shape = f"root tbf rate {8 * bytes_per_s} burst 64kb limit {queue_bytes}"
        command(*inside(self.switch), "tc", "qdisc", "add", "dev", "rlb3", *shape.split())

    def use_cubic(self) -> None:
        """Let the store's host use TCP CUBIC whatever the machine's default, because how streams share a link depends
        on the algorithm."""
        for route in command(*inside(self.store), "ip", "route", "show", "dev", "rlb0").splitlines():
            words = [*route.split(), "dev", "rlb0", "congctl", "cubic"]
            command(*inside(self.store), "ip", "route", "replace", *words)

    def firewall(self, action: str, *rule: str) -> None:
        """Apply a rule to incoming packets at both ends."""
        for host in (self.store, self.reader):
            command(*inside(host), "iptables", action, "INPUT", *rule)

    def lose_packets(self, share: float) -> None:
        """Drop the fraction `share` of packets at both ends."""
        self.firewall("-A", "-m", "statistic", "--mode", "random", "--probability", f"{share}", "-j", "DROP")

    def lost(self) -> int:
        """Return the number of packets dropped."""
        listings = [command(*inside(host), "iptables", "-nvxL", "INPUT") for host in (self.store, self.reader)]
        return sum(int(count) for text in listings for count in re.findall(r"^\s*(\d+)\s+\d+\s+DROP", text, re.M))


@contextlib.contextmanager
def two_hosts(*, switched: bool = False) -> Iterator[Hosts]:
    """Create two hosts for one test."""
    for tool in ("ip", "iptables", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt package {'iptables' if tool == 'iptables' else 'iproute2'})")
    number = os.getpid()
    made = Hosts(f"rlbus-s{number}", f"rlbus-r{number}", f"rlbus-w{number}" if switched else "")
    names = [name for name in (made.store, made.reader, made.switch) if name]
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
            if switched:
                _join(made.store, "rlb0", made.switch, "rlb2")
                _join(made.switch, "rlb3", made.reader, "rlb1")
                command("ip", "-n", made.switch, "link", "add", "rlb4", "type", "bridge")
                for link in ("rlb2", "rlb3", "rlb4"):
                    if link != "rlb4":
                        command("ip", "-n", made.switch, "link", "set", link, "master", "rlb4")
                    command("ip", "-n", made.switch, "link", "set", link, "up")
            else:
                _join(made.store, "rlb0", made.reader, "rlb1")
            for host, link, address in ((made.store, "rlb0", STORE_ADDRESS), (made.reader, "rlb1", READER_ADDRESS)):
                command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", link)
                for each in (link, "lo"):
                    command("ip", "-n", host, "link", "set", each, "up")
            made.firewall("-A", "-i", "lo", "-j", "ACCEPT")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.cmd}: {error.stderr.strip()}")
        yield made
    finally:
        for host in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", host)


def _join(one: str, its_end: str, other: str, others_end: str) -> None:
    command("ip", "-n", one, "link", "add", its_end, "type", "veth", "peer", "name", others_end, "netns", other)
