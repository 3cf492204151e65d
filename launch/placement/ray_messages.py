"""Defines the messages between the launcher and the keeper of the hosts on Ray: lines of JSON through two pipes."""

from __future__ import annotations

from typing import Literal

import msgspec


class Order(msgspec.Struct, frozen=True):
    """An order from the launcher: first `open`, which the keeper answers with events up to `ready` or `failed`; then
    `start`."""

    kind: Literal["open", "start"]
    address: str = ""
    """Address of the cluster, as for `ray.init`."""
    hosts: dict[str, int] = {}
    """The hosts to place, with the number of GPUs of each."""
    home: str = ""
    listen: str = ""
    """Address of home to which the hosts connect, or an empty string for that of its node in the cluster."""
    ports: list[int] = []
    """Ports of home to which the hosts connect."""
    topology: str = ""
    """The topology as YAML, which the hosts check."""
    access: str = ""
    """The access to the run with the role service, encoded in Base64."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event that the keeper reports. `host` is the host that the event concerns, or an empty string."""

    kind: Literal["opened", "failed", "warning", "checked", "ready", "lost", "told", "missing", "refused"]
    text: str = ""
    host: str = ""
    address: str = ""
    """`opened`: the address of the launcher's node."""
    facts: str = ""
    """`checked`: JSON of `HostFacts`."""
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """`checked`: this machine's time, then the host's, then this machine's again, in seconds since 1970."""
