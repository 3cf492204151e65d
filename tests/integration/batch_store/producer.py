"""A producer: `python -m tests.integration.batch_store.producer RUN ELEMENTS`.

For each input line N, it puts the task train/0/N, filled with the number N, and prints a line when the store has sealed
it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from tests.integration.store_process import STORE, peer_of


async def main(run: RunDir, elements: int) -> None:
    async with peer_of(run) as peer:
        while line := await asyncio.to_thread(sys.stdin.readline):
            number = int(line)
            task = TaskShards(f"train/0/{number}", 1, {"w": np.full(elements, number, np.int32)})
            await peer.data.put([task], store=STORE, deadline_s=60)
            print("sealed", flush=True)


if __name__ == "__main__":
    asyncio.run(main(RunDir.open(Path(sys.argv[1])), int(sys.argv[2])))
