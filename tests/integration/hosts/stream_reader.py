"""A reader on another host: `python -m tests.integration.hosts.stream_reader RUN ENDPOINT TASKS KEY...`.

Prints a line when it is ready, waits for a line or the end of its input, fetches the shards, and prints a JSON line
with the digest of every shard and the counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path

import zmq

from proto.ids import new_incarnation
from proto.messages import BatchMeta, BatchPart, TaskHandle
from proto.tensors import checksum
from shared.dataplane.client import DataClient
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.security import keys
from shared.security.roles import Role
from tests.integration.store_process import STORE


async def main(run: RunDir, endpoint: str, tasks: int, names: list[str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = Client(context, endpoint, STORE, new_incarnation(), keys=keys.load(run.keys, Role.SERVICE))
    data = DataClient(lambda service, instance: client, inflight_bytes=4 << 20)
    handles = [TaskHandle(f"train/0/{i}", 1, stores=[0]) for i in range(tasks)]
    meta = BatchMeta(tasks=handles, parts=[BatchPart("s", names)], stores=[STORE])
    print("begins", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    started = time.monotonic()
    found = await data.fetch(meta, names, deadline_s=80)
    seconds = time.monotonic() - started
    digests = [{key: checksum(array) for key, array in arrays.items()} for arrays in found]
    counts = dataclasses.asdict(data.streams.counts)
    print(json.dumps({"digests": digests, "counts": counts, "seconds": seconds}), flush=True)
    data.close()
    client.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    folder, where, count, *wanted = sys.argv[1:]
    asyncio.run(main(RunDir.open(Path(folder)), where, int(count), wanted))
