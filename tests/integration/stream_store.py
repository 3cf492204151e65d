"""A store process whose chunks go over TCP: `python -m tests.integration.stream_store RUN BULK ADVERTISED [plain]`."""

from __future__ import annotations

import sys
from pathlib import Path

from services.batch_store.server import StoreService
from shared.actor.process import run_process
from shared.topology import Topology

BULK, ADVERTISED, *PLAIN = sys.argv[2:]


class TcpStore(StoreService):
    """As a topology with several hosts makes it."""

    def plain_streams(self, loaded: Topology) -> bool:
        return bool(PLAIN)

    def bulk_endpoint(self) -> str:
        return BULK

    def bulk_advertised(self, bound: str) -> str:
        return ADVERTISED or bound


if __name__ == "__main__":
    sys.argv[1:] = ["--run", str(Path(sys.argv[1]))]
    sys.exit(run_process(TcpStore, "batch_store"))
