"""A client on another host, written from proto/SPEC.md alone, that streams a shard. It uses the client in stranger.py.

    python tests/golden/stranger_streams.py ACCESS_FILE TASK FENCE KEY FILE.npy

It registers with the scheduler, which tells it the store's address, and receives sealed ranges over tcp. Numbers in
comments are sections of SPEC.md.
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

BULK = "<4sBBHIIQ"  # Section 11 describes the messages.
HELLO, READ, DATA = 1, 2, 4


def far(endpoint, access):
    """Connect over tcp with the keys of a service (section 1)."""
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.curve_serverkey = access["known"]["service"].encode()
    line.curve_publickey, line.curve_secretkey = access["public"].encode(), access["secret"].encode()
    return Peer(endpoint, line)


def seal_key(secret, line, direction):
    """Derive the key of a seal (section 11) with HKDF-SHA256 (RFC 5869). Its 20 bytes fit into one block."""
    info = f"rlbus bulk {direction}".encode()
    out = hmac.digest(hmac.digest(line, secret, hashlib.sha256), info + b"\1", hashlib.sha256)
    return AESGCM(out[:16]), out[16:20]


def bulk_line(endpoint):
    """Connect a plain socket to `tcp://host:port` or `ipc://path` (section 11)."""
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
    """Open a line and a stream, then read one range after another (section 11)."""
    opened = store.ask(78, 77)
    name, secret = bytes.fromhex(opened["line_id"]), bytes.fromhex(opened["secret"])
    (line, ranges) = bulk_line(opened["endpoint"])
    sealer, prefix = seal_key(secret, name, "store")
    opener, other = seal_key(secret, name, "reader")
    said = 0

    def say(message):
        nonlocal said
        said += 1
        line.sendall(message + sealer.encrypt(prefix + struct.pack("<Q", said), b"", message))

    say(struct.pack(BULK, b"RLBC", 3, HELLO, 0, 0, 0, 0) + name)
    planned = store.ask(103, 102, line_id=opened["line_id"], tasks=[[task, fence]], keys=[key])
    total, number, file = planned["total_bytes"], planned["stream"], bytearray()
    while len(file) < total:
        nbytes = min(1 << 20, total - len(file))
        say(struct.pack(BULK, b"RLBC", 3, READ, 0, number, nbytes, len(file)))
        head = ranges.read(24)
        assert head == struct.pack(BULK, b"RLBC", 3, DATA, 0, number, nbytes, len(file))
        file += opener.decrypt(other + struct.pack("<Q", said - 1), ranges.read(nbytes + 16), head)
    assert xxh3(file[: planned["head_bytes"]]) == planned["head_checksum"]
    assert planned["covered"] == 1
    [found] = shard_of(file, task, fence, key)
    return found


def main(where, task, fence, key, file):
    with open(where) as source:  # Section 1 describes the file.
        access = json.load(source)
    scheduler = far(access["endpoints"]["scheduler"], access)
    me = {"service": "stranger", "instance": 0, "incarnation": scheduler.life, "pid": os.getpid()}
    scheduler.ask(21, 20, **me, host=socket.gethostname(), endpoint="")
    store = scheduler.ask(25, 24, service="batch-store", instance=0)
    np.save(file, stream(far(store["endpoint"], access), task, int(fence), key))


if __name__ == "__main__":
    main(*sys.argv[1:])
