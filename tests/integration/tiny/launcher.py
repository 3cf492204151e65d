"""`launch.cluster` with tiny services in the place of those named in TINY (comma-separated); the rest are real."""

from __future__ import annotations

import os
import sys

from launch import cluster
from launch.supervisor import server, watch

TINY = frozenset(os.environ["TINY"].split(","))
_real = server.module_of


def _module_of(service: str) -> str:
    return f"tests.integration.tiny.{service.replace('-', '_')}" if service in TINY else _real(service)


server.module_of = _module_of
watch.PING_EVERY_S = float(os.environ.get("TINY_PING_EVERY_S", watch.PING_EVERY_S))
watch.SILENCE_S = float(os.environ.get("TINY_SILENCE_S", watch.SILENCE_S))
if __name__ == "__main__":
    sys.exit(cluster.app())
