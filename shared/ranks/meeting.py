"""Determines where the ranks of a process group meet, and which network interface they then use.

Ranks that are all on one host meet through a file in the run's private folder and use the loopback interface. Ranks on
several hosts meet at a port that rank 0 opens at its host's announced address, and each rank uses the interface that
has its own host's announced address. Neither torch's store nor gloo nor NCCL authenticates its peers
(docs/security.md).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from proto.messages import ErrorCode
from shared.actor.service import Service
from shared.ranks.group import Group
from shared.rpc.errors import RpcError

LOOPBACK = "lo"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Meeting:
    """The information that one rank needs to open its process group."""

    interface: str
    """Network interface that the collectives use."""
    file: Path | None = None
    """File through which the ranks of one host meet."""
    store: str = ""
    """Address `HOST:PORT` at which the ranks of several hosts meet."""
    listener: socket.socket | None = None
    """On rank 0, the socket that listens at `store`."""


async def join(group: Group, service: Service, hosts: Collection[str | None]) -> Meeting:
    """Wait until all ranks have joined `group`, and return the information needed to open the process group.

    `hosts` are the hosts of the ranks. Raises DeadlineExceeded and GroupEnded. Raises RpcError(bad_request) if this
    process does not answer other hosts.
    """
    if len(set(hosts)) == 1:
        await group.join()
        return Meeting(LOOPBACK, file=service.run.sockets / f"{service.NAME}-group-{group.generation:x}")
    if group.rank == 0:
        meeting = opened(service.listen)
        await group.join(meeting.store)
        return meeting
    interface = announced_interface(service.listen)
    await group.join()
    return Meeting(interface, store=group.store)


def opened(listen: str) -> Meeting:
    """Open a port at `listen` where ranks on other hosts meet rank 0.

    Raises RpcError(bad_request) as `announced_address` does.
    """
    address = announced_address(listen)
    interface = interface_of(address)
    listener = socket.create_server((address, 0))
    return Meeting(interface, store=f"{address}:{listener.getsockname()[1]}", listener=listener)


def announced_interface(listen: str) -> str:
    """Return the interface on which this process answers other hosts at `listen`. Raises RpcError(bad_request)."""
    return interface_of(announced_address(listen))


def reach_hosts_by_nccl(listen: str) -> None:
    """Make NCCL use the interface on which this process answers other hosts. Call it before NCCL is first used.

    If NCCL_SOCKET_IFNAME already names an interface other than the loopback interface, it is not changed. Raises
    RpcError(bad_request) as `announced_address` does.
    """
    if os.environ.get(NCCL_INTERFACE, LOOPBACK) == LOOPBACK:
        os.environ[NCCL_INTERFACE] = exactly(announced_interface(listen))


def exactly(interface: str) -> str:
    """Return the value of NCCL_SOCKET_IFNAME for this interface. Without "=", NCCL would treat the name as a prefix."""
    return f"={interface}"


def announced_address(listen: str) -> str:
    """Return the IPv4 address in `tcp://ADDRESS:PORT`, where this process answers other hosts.

    Raises RpcError(bad_request) if this process does not answer other hosts, or if the name has no address.
    """
    name = listen.removeprefix("tcp://").rpartition(":")[0]
    if not name:
        raise _refused("this process does not answer other hosts (--listen)")
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise _refused(f"{name} has no address ({error.strerror})") from None


def interface_of(address: str) -> str:
    """Return the network interface of this host that has `address`. Raises RpcError(bad_request) if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    raise _refused(f"no network interface of this host has the address {address}")


def _refused(why: str) -> RpcError:
    remedy = "give each of their hosts an address of its own (transport.listen, --address)"
    return RpcError(ErrorCode.BAD_REQUEST, f"ranks on several hosts: {why}; {remedy}")
