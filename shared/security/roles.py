"""What a peer may be, and which messages it may send. A message that nobody thought of must stay with services."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from proto.messages import (
    GetLog,
    GetSnapshot,
    GetStatus,
    GetStoreStats,
    GetSupervisorState,
    Ping,
    Resolve,
    RestartService,
    StopRun,
)
from proto.registry import Message


class Role(enum.IntEnum):
    """In ascending order of rights: each may do what the ones before it may."""

    OBSERVER = 1
    """Watches: the monitor's stream and snapshot, nothing else."""
    OPERATOR = 2
    """Looks at a run and steers it (launch.ctl)."""
    SERVICE = 3
    """Is a part of the run: everything."""

    @property
    def label(self) -> str:
        """The name in key files, ZAP domains, logs."""
        return self.name.lower()

    @classmethod
    def of_label(cls, label: str) -> Role:
        """Raises ValueError for any other text."""
        for role in cls:
            if role.label == label:
                return role
        raise ValueError(f"role {label!r}: one of {', '.join(role.label for role in cls)}")


LEAST_ROLE: Mapping[type[Message], Role] = MappingProxyType(
    {
        Ping: Role.OBSERVER,
        GetSnapshot: Role.OBSERVER,
        GetLog: Role.OPERATOR,
        GetStatus: Role.OPERATOR,
        GetStoreStats: Role.OPERATOR,
        GetSupervisorState: Role.OPERATOR,
        Resolve: Role.OPERATOR,
        RestartService: Role.OPERATOR,
        StopRun: Role.OPERATOR,
    }
)
"""The least role that may send a message; what is not listed is for services only."""


def least_role(kind: type[Message]) -> Role:
    """The least role that may send messages of this type."""
    return LEAST_ROLE.get(kind, Role.SERVICE)
