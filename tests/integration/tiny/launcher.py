"""`launch.cluster` with tiny services instead of those named in TINY (comma-separated); all others are real."""

from __future__ import annotations

import os
import sys

from launch import cluster
from launch.supervisor import server, watch
from shared.topology import Topology

TINY = frozenset(os.environ["TINY"].split(","))
_real = server.module_of
_heavy_imports = cluster.heavy_imports


def _module_of(service: str) -> str:
    return f"tests.integration.tiny.{service.replace('-', '_')}" if service in TINY else _real(service)


def _imports(topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return the modules that spares of the tiny services import: TINY_IMPORTS, or small default ones."""
    imports = os.environ.get("TINY_IMPORTS", "numpy,tests.integration.tiny.service").split(",")
    return {service: (*imports,) for service in _heavy_imports(topology)}


server.module_of = _module_of
cluster.heavy_imports = _imports
watch.PING_EVERY_S = float(os.environ.get("TINY_PING_EVERY_S", watch.PING_EVERY_S))
watch.SILENCE_S = float(os.environ.get("TINY_SILENCE_S", watch.SILENCE_S))
if __name__ == "__main__":
    sys.exit(cluster.app())
