"""A client written from SPEC.md alone: `stranger.py put|get RUN_DIR TASK FENCE KEY FILE.npy`. Numbers cite sections."""

import fcntl
import json
import mmap
import os
import struct
import sys

import msgpack
import numpy as np
import zmq
from xxhash import xxh3_64_intdigest as xxh3

ENVELOPE, HEADER, ROW = "<4sBBHHHIQQIIIIQ", "<4sHHIIIIIIQQQ", "<IBBHQQQ"  # They omit the final checksums (2, 9).
CODE = {"float32": 12, "int32": 7, "int64": 9, "uint8": 2}  # Section 5 lists all codes.


class Peer:  # A peer sends one request at a time, and repeats it under its id until it is answered (8).
    def __init__(self, endpoint, socket=None):
        self.socket = socket or zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.life, self.number = (int.from_bytes(os.urandom(7)) for _ in range(2))

    def ask(self, kind, answer, **body):
        self.number, body = self.number + 1, msgpack.packb(body)
        for left_ms in range(20_000, 0, -500):
            sizes = (len(body), 0, 0, 0, len(body))
            head = struct.pack(ENVELOPE, b"RLBS", 1, 0, kind, 0, 0, left_ms, self.number, self.life, *sizes)
            self.socket.send_multipart([head + struct.pack("<Q", xxh3(head)), body])
            while self.socket.poll(500):
                head, reply = self.socket.recv_multipart()
                assert head[56:] == struct.pack("<Q", xxh3(head[:56]))
                fields = struct.unpack_from(ENVELOPE, head)
                if fields[7] == self.number and fields[4] & 1:
                    assert fields[3] == answer, msgpack.unpackb(reply)
                    return msgpack.unpackb(reply)
        raise TimeoutError(f"message {kind}")


def put(store, task, fence, shards):  # Put the shards of one task by key; return the content hash (8, 9).
    names, keys, sums = task.encode(), "\n".join(shards).encode(), [xxh3(each.tobytes()) for each in shards.values()]
    dims = b"".join(struct.pack(f"<{each.ndim}Q", *each.shape) for each in shards.values())
    rows, file = b"", bytearray(64 + 8 + len(dims) + 32 * len(shards) + 4 + len(names) + len(keys))
    for number, (each, check) in enumerate(zip(shards.values(), sums, strict=True)):
        file += bytes(-len(file) % 64)
        rows += struct.pack(ROW, number, CODE[each.dtype.name], each.ndim, 0, len(file), each.nbytes, check)
        file += each.tobytes()
    table = struct.pack("<Q", fence) + dims + rows + struct.pack("<I", len(shards)) + names + keys
    sizes = (1, len(shards), len(shards), len(dims) // 8, len(names), len(keys), len(file))
    head = struct.pack(HEADER, b"RLBF", 1, 0, *sizes, xxh3(table), 0)
    file[: 64 + len(table)] = head + struct.pack("<Q", xxh3(head)) + table
    name = os.urandom(16).hex()
    path = store.ask(61, 60, put_id=name, nbytes=len(file), tasks=[[task, fence]])["path"]
    with open(path, "r+b", buffering=0) as target:
        fcntl.flock(target, fcntl.LOCK_SH)
        assert os.path.samestat(os.fstat(target.fileno()), os.stat(path))
        target.write(file)
        store.ask(63, 62, put_id=name)
    return xxh3(struct.pack(f"<{len(sums)}Q", *sums))


def shard_of(file, task, fence, key):  # Return one shard of a block file, checked (9).
    magic, layout, _, tasks, _, rows, dims, task_bytes, key_bytes, size, check, _ = struct.unpack_from(HEADER, file)
    at_dims, at_rows, at_counts = 64 + 8 * tasks, 64 + 8 * (tasks + dims), 64 + 8 * (tasks + dims) + 32 * rows
    at_keys = at_counts + 4 * tasks + task_bytes
    assert (magic, layout, size, check) == (b"RLBF", 1, len(file), xxh3(file[64 : at_keys + key_bytes]))
    assert struct.unpack_from("<Q", file, 56) == (xxh3(file[:56]),)
    names = bytes(file[at_keys - task_bytes : at_keys]).decode().split("\n")
    keys = bytes(file[at_keys : at_keys + key_bytes]).decode().split("\n")
    fences, counts = (struct.unpack_from(f"<{tasks}{kind}", file, at) for kind, at in (("Q", 64), ("I", at_counts)))
    for row, owner in enumerate(np.repeat(np.arange(tasks), counts)):
        index, code, ndim, _, begin, nbytes, digest = struct.unpack_from(ROW, file, at_rows + 32 * row)
        shape, at_dims = struct.unpack_from(f"<{ndim}Q", file, at_dims), at_dims + 8 * ndim
        if (names[owner], fences[owner], keys[index]) == (task, fence, key):
            data = bytes(file[begin : begin + nbytes])
            assert xxh3(data) == digest
            yield np.frombuffer(data, next(name for name in CODE if CODE[name] == code)).reshape(shape)


def get(store, task, fence, key):  # Locate and read a shard (8).
    for path in store.ask(65, 64, tasks=[[task, fence]])["files"]:
        with open(path, "rb") as source:
            fcntl.flock(source, fcntl.LOCK_SH)
            assert os.path.samestat(os.fstat(source.fileno()), os.stat(path))
            with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY) as file:
                for found in shard_of(file, task, fence, key):
                    return found
    raise LookupError(f"{task}#{key}")


if __name__ == "__main__":
    action, run_dir, task, fence, key, file = sys.argv[1:]
    with open(f"{run_dir}/run.json") as source:  # Section 1 describes the file.
        store = Peer(f"ipc://{json.load(source)['sockets']}/batch-store-0")
    if action == "put":
        put(store, task, int(fence), {key: np.load(file)})
    else:
        np.save(file, get(store, task, int(fence), key))
