"""A second implementation of the wire, written from proto/SPEC.md alone.

    python tests/golden/stranger.py RUN_DIR OUT.json

does the work of a rollout service for one task, and says which task that was. It imports nothing of this project, so
that what it can do is what the document says. Numbers in comments are SPEC's sections.
"""

import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import time

import msgpack
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest as xxh3

ENVELOPE = "<4sBBHHHIQQIIIIQ"  # 2, without the checksum
HEADER = "<4sHHIIIIIIQQQ"  # 9, without the checksum
CODE = {"float32": 12, "int32": 7, "int64": 9, "uint8": 2}  # 5


class Peer:
    """8: one request at a time, sent again under its id until it is answered."""

    def __init__(self, endpoint, keys=None):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        if keys:  # 1: between hosts
            self.socket.curve_serverkey = keys["known"]["service"].encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = keys["public"].encode(), keys["secret"].encode()
        self.socket.connect(endpoint)
        self.incarnation, self.number = secrets.randbits(63), secrets.randbits(62)

    def ask(self, kind, answer, wait_s=20.0, **body):
        self.number += 1
        packed, until, pause_s = msgpack.packb(body), time.monotonic() + wait_s, 0.25
        while (left_s := until - time.monotonic()) > 0:
            head = struct.pack(
                ENVELOPE, b"RLBS", 1, 0, kind, 0, 0, int(left_s * 1000), self.number, self.incarnation,
                len(packed), 0, 0, 0, len(packed),
            )  # fmt: skip
            self.socket.send_multipart([head + struct.pack("<Q", xxh3(head)), packed])
            while self.socket.poll(int(pause_s * 1000)):
                head, reply = self.socket.recv_multipart()
                assert xxh3(head[:56]) == struct.unpack("<Q", head[56:])[0]
                fields = struct.unpack_from(ENVELOPE, head)
                if fields[7] == self.number and fields[4] & 1:
                    values = msgpack.unpackb(reply)
                    assert fields[3] == answer, values
                    return values
            pause_s = min(2 * pause_s, 2.0)
        raise TimeoutError(f"message {kind}")


def block(task, fence, shards):
    """9: the file of one put with one task; and its content hash (8)."""
    names, keys = task.encode(), "\n".join(shards).encode()
    dims = b"".join(struct.pack(f"<{each.ndim}Q", *each.shape) for each in shards.values())
    table_bytes = 8 + len(dims) + 32 * len(shards) + 4 + len(names) + len(keys)
    rows, parts, sums, end = b"", [], b"", 64 + table_bytes
    for number, each in enumerate(shards.values()):
        data, begin = each.tobytes(), -(-end // 64) * 64
        row = (number, CODE[each.dtype.name], each.ndim, 0, begin, len(data), xxh3(data))
        rows, sums = rows + struct.pack("<IBBHQQQ", *row), sums + struct.pack("<Q", row[-1])
        parts.append((begin, data))
        end = begin + len(data)
    table = struct.pack("<Q", fence) + dims + rows + struct.pack("<I", len(shards)) + names + keys
    sizes = (1, len(shards), len(shards), len(dims) // 8, len(names), len(keys))
    head = struct.pack(HEADER, b"RLBF", 1, 0, *sizes, end, xxh3(table), 0)
    file = bytearray(end)
    file[: 64 + table_bytes] = head + struct.pack("<Q", xxh3(head)) + table
    for begin, data in parts:
        file[begin : begin + len(data)] = data
    return file, xxh3(sums)


def put(store, task, fence, shards):
    """8, Put; returns the content hash."""
    file, digest = block(task, fence, shards)
    name = secrets.token_hex(16)
    path = store.ask(61, 60, put_id=name, nbytes=len(file), tasks=[[task, fence]])["path"]
    with open(path, "r+b") as target:
        fcntl.flock(target, fcntl.LOCK_SH)
        assert os.fstat(target.fileno()).st_ino == os.stat(path).st_ino
        target.write(file)
        target.flush()
        store.ask(63, 62, put_id=name)
    return digest


def inline(array):
    """3: as msgpack-numpy writes it."""
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


def rollout(sockets, out):
    """8, Work: one task, two samples, everything that the stage makes."""
    scheduler, store = (Peer(f"ipc://{sockets}/{name}") for name in ("scheduler-0", "batch-store-0"))
    me = {"service": "rollout", "instance": 7, "incarnation": scheduler.incarnation}
    scheduler.ask(21, 20, **me, pid=os.getpid(), host=socket.gethostname(), endpoint="")
    grant = scheduler.ask(31, 30, **me, stage="rollout", max_tasks=1)
    task, fence = grant["batch"]["tasks"][0][:2]
    lengths = np.array([5, 4], np.int32)
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], np.uint8)
    shards = {
        "token_ids": np.arange(1, 10, dtype=np.int32),
        "lengths": lengths,
        "sample_index": np.arange(2, dtype=np.int32),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
    }
    digest = put(store, task, fence, shards)
    result = [
        task,
        fence,
        0,
        "batch-store/0",
        digest,
        2,
        int(lengths.sum()),
        sum(each.nbytes for each in shards.values()),
    ]
    rewards = {"reward": inline(np.array([1, 0], np.float32))}
    answer = scheduler.ask(
        33,
        32,
        lease_id=grant["lease_id"],
        stage="rollout",
        incarnation=me["incarnation"],
        results=[result],
        scalars=rewards,
    )
    assert not answer["refused"], answer
    with open(out, "w") as file:
        json.dump({"task": task, "fence": fence}, file)


def main(run_dir, out):
    with open(f"{run_dir}/run.json") as source:  # 1
        rollout(json.load(source)["sockets"], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
