"""`ServiceSpec` identifies one process of a run for the launcher, without the command that starts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceSpec:
    """A process `service/instance` and its host in `placement.hosts` (None: this machine)."""

    service: str
    instance: int
    host: str | None = None

    @property
    def name(self) -> str:
        return f"{self.service}/{self.instance}"
