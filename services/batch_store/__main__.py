"""Starts a batch store: `python -m services.batch_store --run DIR --instance N`."""

from __future__ import annotations

import sys

from services.batch_store.server import StoreService
from shared.actor.process import run_process

if __name__ == "__main__":
    sys.exit(run_process(StoreService, "batch_store"))
