"""Any number of hosts on one machine: network namespaces joined by a switch over links with a limited rate."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.integration import netns
from tests.integration.two_hosts import command, inside

QUEUE_S = 0.02
"""Maximum length of the queue at each end of a link, in seconds of traffic. Further packets are lost."""


class Unavailable(Exception):
    """This machine cannot create network namespaces."""


@dataclass(frozen=True)
class Host(netns.Host):
    """A host and its link."""

    def set_line(self, state: str) -> None:
        """Set the link `up` or `down`."""
        command("ip", "-n", self.namespace, "link", "set", "star0", state)


def limit(namespace: str, link: str, bytes_per_s: int) -> None:
    """Limit the rate at which a namespace sends over a link."""
    queue = max(64_000, int(QUEUE_S * bytes_per_s))
    shape = f"root tbf rate {8 * bytes_per_s} burst 64kb limit {queue}"
    command(*inside(namespace), "tc", "qdisc", "replace", "dev", link, *shape.split())


@contextlib.contextmanager
def star(count: int, bytes_per_s: int) -> Iterator[Sequence[Host]]:
    """Create `count` hosts, each with a link of `bytes_per_s` in each direction. Raises Unavailable.

    In each host's namespace, the end of its link is named `star0`.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (apt package iproute2)")
    number = os.getpid()
    switch = f"rlbus-w{number}"
    hosts = [Host(f"rlbus-h{i}-{number}", f"10.{205 + number % 40}.{number // 40 % 256}.{i + 1}") for i in range(count)]
    names = [switch, *(host.namespace for host in hosts)]
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
            command("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            command("ip", "-n", switch, "link", "set", "bridge0", "up")
            for i, host in enumerate(hosts):
                port = f"port{i}"
                command(
                    *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                    *("peer", "name", "star0", "netns", host.namespace),
                )
                command("ip", "-n", switch, "link", "set", port, "master", "bridge0")
                command("ip", "-n", switch, "link", "set", port, "up")
                command("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "star0")
                for each in ("star0", "lo"):
                    command("ip", "-n", host.namespace, "link", "set", each, "up")
                limit(host.namespace, "star0", bytes_per_s)
                limit(switch, port, bytes_per_s)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"network namespaces are not permitted here: {error.stderr.strip()}") from None
        yield hosts
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", name)
