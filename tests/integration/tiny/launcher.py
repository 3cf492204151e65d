"""`launch.cluster` with tiny services instead of those named in TINY (comma-separated); all others are real."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from launch import cluster
from launch.spares.processes import SpareKind
from launch.supervisor import runner
from shared.topology import Topology

TINY = frozenset(os.environ["TINY"].split(","))
IMPORTS = "numpy,tests.integration.tiny.service,services.monitor.server,services.recorder.server"
_real = runner.command_of
_spare_kinds = cluster.spare_kinds


def _command_of(service: str) -> list[str]:
    return [f"tests.integration.tiny.{service.replace('-', '_')}"] if service in TINY else _real(service)


def _kinds(topology: Topology, services: Collection[str]) -> list[SpareKind]:
    """Return one kind of spare, with TINY_IMPORTS or the imports of tiny services and of the real ones beside them."""
    imports = os.environ.get("TINY_IMPORTS", IMPORTS).split(",")
    forked = [service for kind in _spare_kinds(topology, services) for service in kind.services]
    return [SpareKind(tuple(forked), (*imports,))] if forked else []


runner.command_of = _command_of
cluster.spare_kinds = _kinds
runner.PING_EVERY_S = float(os.environ.get("TINY_PING_EVERY_S", runner.PING_EVERY_S))
runner.SILENCE_S = float(os.environ.get("TINY_SILENCE_S", runner.SILENCE_S))
if __name__ == "__main__":
    sys.exit(cluster.app())
