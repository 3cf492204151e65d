"""The roles of peers and the messages that each role may send. Messages that are not listed are for services only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from proto.messages import (
    DrainService,
    GetHistory,
    GetLog,
    GetSnapshot,
    GetStatus,
    GetStoreStats,
    GetStory,
    GetSupervisorState,
    GetWaits,
    Ping,
    Resolve,
    RestartService,
    ScaleService,
    StopRun,
)
from proto.registry import Message


class Role(enum.IntEnum):
    """Roles in ascending order of rights. Each role may do everything that the previous roles may."""

    OBSERVER = 1
    """A role that may read the stream, the snapshot and the history of the monitor, and nothing else."""
    OPERATOR = 2
    """A role that may inspect and control a run (launch.ctl)."""
    SERVICE = 3
    """The role of the run's own processes, which may send every message."""

    @property
    def label(self) -> str:
        """The name in key files, ZAP domains and logs."""
        return self.name.lower()

    @classmethod
    def of_label(cls, label: str) -> Role:
        """Return the role called `label`. Raises ValueError if no role has that name."""
        for role in cls:
            if role.label == label:
                return role
        raise ValueError(f"role {label!r}: one of {', '.join(role.label for role in cls)}")


LEAST_ROLE: Mapping[type[Message], Role] = MappingProxyType(
    {
        Ping: Role.OBSERVER,
        GetHistory: Role.OBSERVER,
        GetSnapshot: Role.OBSERVER,
        DrainService: Role.OPERATOR,
        GetLog: Role.OPERATOR,
        GetStatus: Role.OPERATOR,
        GetStoreStats: Role.OPERATOR,
        GetStory: Role.OPERATOR,
        GetSupervisorState: Role.OPERATOR,
        GetWaits: Role.OPERATOR,
        Resolve: Role.OPERATOR,
        RestartService: Role.OPERATOR,
        ScaleService: Role.OPERATOR,
        StopRun: Role.OPERATOR,
    }
)
"""The lowest role that may send each type of message. Messages that are not listed are for services only."""


def least_role(kind: type[Message]) -> Role:
    """Return the lowest role that may send messages of this type."""
    return LEAST_ROLE.get(kind, Role.SERVICE)
