"""`ServiceSpec`: one process of a run by name, as the launcher starts it; it never says how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceSpec:
    """`service/instance`, and the host of `placement.hosts` it belongs on (None: this machine)."""

    service: str
    instance: int
    host: str | None = None

    @property
    def name(self) -> str:
        return f"{self.service}/{self.instance}"
