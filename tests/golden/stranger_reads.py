"""The reading half of the second implementation, from proto/SPEC.md alone: maps a shard, or has it streamed.

    python tests/golden/stranger_reads.py get RUN_DIR TASK FENCE KEY FILE.npy
    python tests/golden/stranger_reads.py stream ACCESS_FILE TASK FENCE KEY FILE.npy

The second is on another host: registered with the scheduler, which says where the store is; sealed chunks over tcp.
"""

import fcntl
import hashlib
import hmac
import json
import mmap
import os
import socket
import struct
import sys

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from stranger import CODE, HEADER, Peer
from xxhash import xxh3_64_intdigest as xxh3

BULK = "<4sBBHIIQ16sII"  # 11
CREDIT, CHUNK, CLOSE = 1, 2, 2
TYPE = {code: name for name, code in CODE.items()}


def shard_of(file, task, fence, key):
    """9: one shard of a block file, checked; None if it is not there."""
    magic, layout, _, tasks, _, rows, dims, task_bytes, key_bytes, size, check, _ = struct.unpack_from(HEADER, file)
    assert (magic, layout, size) == (b"RLBF", 1, len(file))
    assert xxh3(file[:56]) == struct.unpack_from("<Q", file, 56)[0]
    at_dims, at_rows = 64 + 8 * tasks, 64 + 8 * tasks + 8 * dims
    at_names = at_rows + 32 * rows + 4 * tasks
    assert xxh3(file[64 : at_names + task_bytes + key_bytes]) == check
    counts = struct.unpack_from(f"<{tasks}I", file, at_rows + 32 * rows)
    names = bytes(file[at_names : at_names + task_bytes]).decode().split("\n")
    key_names = bytes(file[at_names + task_bytes : at_names + task_bytes + key_bytes]).decode().split("\n")
    fences = struct.unpack_from(f"<{tasks}Q", file, 64)
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    for row in range(rows):
        index, code, ndim, _, begin, nbytes, digest = struct.unpack_from("<IBBHQQQ", file, at_rows + 32 * row)
        shape = struct.unpack_from(f"<{ndim}Q", file, at_dims)
        at_dims += 8 * ndim
        if (names[owner[row]], fences[owner[row]], key_names[index]) == (task, fence, key):
            data = bytes(file[begin : begin + nbytes])
            assert xxh3(data) == digest
            return np.frombuffer(data, TYPE[code]).reshape(shape)
    return None


def get(store, task, fence, key):
    """8, Locate and read."""
    located = store.ask(65, 64, tasks=[[task, fence]])
    for place in located["places"][0]:
        with open(located["files"][place], "rb") as source:
            fcntl.flock(source, fcntl.LOCK_SH)
            assert os.fstat(source.fileno()).st_ino == os.stat(source.name).st_ino
            with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY) as file:
                if (found := shard_of(file, task, fence, key)) is not None:
                    return found
    raise LookupError(f"{task} {key}")


def seal_key(secret, stream, direction, epoch):
    """11, Seal: HKDF-SHA256 (RFC 5869), 20 bytes, which is one block of it."""
    info = f"rlbus bulk {direction} ".encode() + struct.pack("<I", epoch)
    out = hmac.digest(hmac.digest(stream, secret, hashlib.sha256), info + b"\1", hashlib.sha256)
    return AESGCM(out[:16]), out[16:20]


def bulk_line(endpoint):
    """11: a plain socket; `tcp://host:port` or `ipc://path`."""
    scheme, place = endpoint.split("://")
    if scheme == "ipc":
        line = socket.socket(socket.AF_UNIX)
        line.connect(place)
    else:
        host, port = place.rsplit(":", 1)
        line = socket.create_connection((host, int(port)))
    line.settimeout(20)
    return line, line.makefile("rb")


def stream(store, task, fence, key):
    """11: credit for every chunk, then the chunks."""
    opened = store.ask(72, 71, tasks=[[task, fence]], keys=[key])
    size, total, name = opened["chunk_bytes"], opened["total_bytes"], bytes.fromhex(opened["stream_id"])
    secret, (line, chunks) = bytes.fromhex(opened["secret"]), bulk_line(opened["endpoint"])
    cipher, salt = seal_key(secret, name, "credit", 1)

    def credit(flags, counter, *pairs):
        payload = struct.pack(f"<{len(pairs)}I", *pairs)
        head = struct.pack(BULK, b"RLBC", 2, CREDIT, flags, 1, 0, counter, name, len(payload) + 16, 0)
        line.sendall(head + cipher.encrypt(salt + struct.pack("<Q", counter), payload, head))

    file, missing = bytearray(total), set(range(-(-total // size)))
    credit(0, 1, 0, len(missing))
    while missing:
        head = chunks.read(48)
        magic, version, kind, _, epoch, chunk, counter, _, nbytes, _ = struct.unpack(BULK, head)
        assert (magic, version, kind) == (b"RLBC", 2, CHUNK)
        opener, prefix = seal_key(secret, name, "chunks", epoch)
        data = opener.decrypt(prefix + struct.pack("<Q", counter), chunks.read(nbytes), head)
        file[chunk * size : chunk * size + len(data)] = data
        missing.discard(chunk)
    credit(CLOSE, 2)
    assert xxh3(file[: opened["head_bytes"]]) == opened["head_checksum"]
    assert opened["covered"] == 1
    return shard_of(memoryview(file), task, fence, key)


def main(action, where, task, fence, key, file):
    with open(f"{where}/run.json" if action == "get" else where) as source:  # 1
        access = json.load(source)
    if action == "get":
        found = get(Peer(f"ipc://{access['sockets']}/batch-store-0"), task, int(fence), key)
    else:
        scheduler = Peer(access["endpoints"]["scheduler"], access)
        me = {"service": "stranger", "instance": 0, "incarnation": scheduler.incarnation, "pid": os.getpid()}
        scheduler.ask(21, 20, **me, host=socket.gethostname(), endpoint="")
        store = scheduler.ask(25, 24, service="batch-store", instance=0)
        found = stream(Peer(store["endpoint"], access), task, int(fence), key)
    np.save(file, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
