"""A store whose chunks go over TCP: `python -m tests.integration.stream_store --run D BULK ADVERTISED [DEFECT]`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from services.batch_store.server import StoreService
from shared.actor.process import run_process

BULK, ADVERTISED, DEFECT = [*sys.argv[3:], ""][:3]


class TcpStore(StoreService):
    """A store that serves over TCP, as in a topology with several hosts."""

    def bulk_endpoint(self) -> str:
        return BULK

    def bulk_advertised(self, bound: str) -> str:
        return ADVERTISED or bound


def plant(defect: str) -> None:
    """Make `module:class.method` raise an unexpected KeyError."""

    def broken(*_: Any) -> Any:
        raise KeyError("planted")

    module, _, path = defect.partition(":")
    owner, _, method = path.partition(".")
    setattr(getattr(importlib.import_module(module), owner), method, broken)


if __name__ == "__main__":
    if DEFECT:
        plant(DEFECT)
    sys.argv[3:] = []
    sys.exit(run_process(TcpStore, "batch_store"))
