"""A stranger on another host, from proto/SPEC.md alone: has a shard streamed, beside the client in stranger.py.

    python tests/golden/stranger_streams.py ACCESS_FILE TASK FENCE KEY FILE.npy

It registers with the scheduler, which says where the store is; sealed chunks come over tcp. Numbers in comments are
SPEC's sections.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys

import numpy as np
import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from stranger import Peer, shard_of
from xxhash import xxh3_64_intdigest as xxh3

BULK = "<4sBBHIIQ16sII"  # 11
CREDIT, CHUNK, CLOSE = 1, 2, 2


def far(endpoint, access):
    """1: over tcp, under the keys of a service."""
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.curve_serverkey = access["known"]["service"].encode()
    line.curve_publickey, line.curve_secretkey = access["public"].encode(), access["secret"].encode()
    return Peer(endpoint, line)


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
    [found] = shard_of(file, task, fence, key)
    return found


def main(where, task, fence, key, file):
    with open(where) as source:  # 1
        access = json.load(source)
    scheduler = far(access["endpoints"]["scheduler"], access)
    me = {"service": "stranger", "instance": 0, "incarnation": scheduler.life, "pid": os.getpid()}
    scheduler.ask(21, 20, **me, host=socket.gethostname(), endpoint="")
    store = scheduler.ask(25, 24, service="batch-store", instance=0)
    np.save(file, stream(far(store["endpoint"], access), task, int(fence), key))


if __name__ == "__main__":
    main(*sys.argv[1:])
