"""A store whose chunks go over TCP: `python -m tests.integration.stream_store RUN BULK ADVERTISED [PLAIN DEFECT]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from services.batch_store.server import StoreService
from shared.actor.process import run_process
from shared.topology import Topology

BULK, ADVERTISED, PLAIN, DEFECT = [*sys.argv[2:], "", ""][:4]


class TcpStore(StoreService):
    """As a topology with several hosts makes it."""

    def plain_streams(self, loaded: Topology) -> bool:
        return bool(PLAIN)

    def bulk_endpoint(self) -> str:
        return BULK

    def bulk_advertised(self, bound: str) -> str:
        return ADVERTISED or bound


def plant(defect: str) -> None:
    """Make `module:class.method` raise what nobody expects of it."""

    def broken(*_: Any) -> Any:
        raise KeyError("planted")

    module, _, path = defect.partition(":")
    owner, _, method = path.partition(".")
    setattr(getattr(importlib.import_module(module), owner), method, broken)


if __name__ == "__main__":
    if DEFECT:
        plant(DEFECT)
    sys.argv[1:] = ["--run", str(Path(sys.argv[1]))]
    sys.exit(run_process(TcpStore, "batch_store"))
