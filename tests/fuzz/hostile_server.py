"""A mailbox in a separate process, attacked by hostile peers: `python -m tests.fuzz.hostile_server KEYS IPC`.

It prints its tcp endpoint and then, for each line of input, one JSON object with its counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import structlog
import zmq

from proto.messages import GetInventory, GetSnapshot, Inventory, Snapshot, TopicRow
from shared.rpc.mailbox import Call, Mailbox
from shared.security.keys import load
from shared.security.roles import Role
from shared.security.zap import Gate

TEXT = "x" * 200_000


def large(_: GetSnapshot, __: Call) -> Snapshot:
    row = TopicRow(service="echo", instance=0, topic="t", at=0.0, values={"text": TEXT})
    return Snapshot(sequence=1, rows=[row], dropped=0)


def double(request: GetInventory, _: Call) -> Inventory:
    return Inventory(tasks=[], cursor=2 * request.cursor)


async def main(folder: str, ipc: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    gate = Gate(context, load(Path(folder), Role.SERVICE))
    mailbox = Mailbox("echo/0", 1)
    mailbox.handle(GetInventory, double)
    mailbox.handle(GetSnapshot, large)
    mailbox.bind(context, ipc)
    print(mailbox.bind(context, "tcp://127.0.0.1:0", gate=gate, admits=Role.OBSERVER), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps({**mailbox.counts(), "peers": len(mailbox.offenders)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
