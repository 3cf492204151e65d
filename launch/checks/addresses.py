"""Checks that the addresses of a run can be used, and the file of keys of a server."""

from __future__ import annotations

import errno
import os
import socket

from launch.checks.findings import Findings
from shared.topology import Topology
from shared.topology.monitor import split_address
from shared.topology.serve import KeysError, read_keys


def check_address(address: tuple[str, int], keys: tuple[str, str], findings: Findings) -> bool:
    """Check that an address can be used. Return False if no other port on the same host can be used either.

    `keys` are the topology keys that set the port and the host.
    """
    host, port = address
    try:
        with socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except socket.gaierror as error:
        findings.error(f"{keys[1]}: {host}: {error.strerror}")
        return False
    except OSError as error:
        here = error.errno != errno.EADDRNOTAVAIL
        named = f"{keys[0]}: {port}" if here else f"{keys[1]}: {host}"
        remedy = "choose another" if here else "give an address of this machine"
        findings.error(f"{named} cannot be used ({os.strerror(error.errno or 0)}); {remedy}")
        return here


def check_doors(topology: Topology, findings: Findings) -> None:
    """Check that the address and the ports for other hosts, if any, can be used."""
    transport = topology.transport
    if transport.listen is None:
        return
    for key in ("scheduler_port", "supervisor_port", "monitor_port"):
        address = (transport.listen, getattr(transport, key))
        if not check_address(address, (f"transport.{key}", "transport.listen"), findings):
            return


def check_server(topology: Topology, findings: Findings) -> None:
    """Check the file of keys and the address of a server."""
    serve = topology.serve
    if serve is None:
        return
    if serve.keys is not None:
        try:
            read_keys(serve.keys)
        except KeysError as error:
            findings.error(f"serve.keys: {error}")
    check_address(split_address(serve.listen), ("serve.listen",) * 2, findings)
