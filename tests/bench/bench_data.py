"""Compares the data plane with the machine's limits and with its peers in one command, because absolute figures alone
mean little.

    python -m tests.bench.bench_data [--sizes 1,4,16] [--rounds N] [--firsts N] [--no-peers] [--no-scheduler]
    python -m tests.bench.bench_data --only-peers
    python -m tests.bench.bench_data --sweep [ray|transfer-queue]    find the peers' fastest settings and record them

The store process and the client are real, and RPC is included. Regular work: 1024 tasks x 9 keys x 8192 float32 (302
MB); ragged: 8192 tasks x 6 keys of 0.5 to 4k tokens (332 MB), put as lease blocks of 64 tasks. Each size is a
multiplier for the number of tasks (16: 4.8 GB, with three copies in memory at a time); sizes above 1 put the same
arrays under more names. Peers run at size 1. The scheduler runs once with 100,000 live tasks, as a process and as its
state machine alone. A measurement and its limit take turns, and swap their order every time.

put         Time from the call to the last receipt. Two blocks are in progress on two threads ("dataplane"); a third
            ("dataplane-helper") takes half of every block of 8 MiB or more. Every byte is also hashed. Its limits write
            the same blocks to new files on the same mount without hashing: one thread that calls write once per tensor,
            and two threads with a writev of up to 1024 tensors.
first put   The first put into a store that has just been started, whose pages are all new. It is measured on several
            stores, with one put each.
later puts  The store lends the pages of collected files, as in every step of a run but the first; the limits write new
            files each time.
get + read  The first fetch of new files, which verifies every checksum, and the xxh3 of each array (the cheapest call
            that reads every byte: 13 GB/s, against 4 for a sum in float64). Its limits hash the same slices of mapped
            files: cold, including the page faults, and warm, through the same mappings again. "get again" is the same
            fetch without the verification, which a process performs once per file. Readers keep their mappings of lent
            pages.
TCP get     Time until every array is received and checked, against a plain `recv` of as many bytes from one connection
            into memory that had been touched before (a ring of at most 512 MB, because with a hot buffer of one chunk
            the cost of memory would not be measured). Neither side reads the data again. For the limit, the sender
            sends one hot block repeatedly.
peers       Each runs with newly started processes and alternates with a fresh store of ours, with the settings that a
            recorded sweep found fastest (`peers/data_sweep.json`); `peers/data_peers.py` describes what they do. A peer
            gets one array for each of the nine keys and each block of tasks; the sweep chooses the size of the blocks.

The memory is touched once beforehand, because the first use of its pages costs the host of a virtual machine 1 to 2 s
per GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import zmq
from rich.console import Console
from rich.table import Table

from proto.messages import Ping, Pong
from proto.tensors import Array
from shared.dataplane.client import DataClient, TaskShards
from shared.dataplane.reach import Reach
from tests.bench import against_data_peers, scheduler_load
from tests.bench.cluster_run import BenchError
from tests.bench.data_work import (
    BLOCK_TASKS,
    Rows,
    Work,
    clear,
    digest,
    fresh_store,
    meta_of,
    nbytes_of,
    put_blocks,
    ragged,
    regular,
    timed_fetch,
)
from tests.bench.turns import TURNS, heading, order, ratios, spread
from tests.integration.store_process import STORE, Peer, make_run, peer_of
from tests.integration.stream_line import in_clear

CHUNK = 1 << 20
RING_BYTES = 512 << 20
MAX_PIECES = 1024
PUT_THREADS = (
    'put writes and hashes on two threads ("dataplane", a block each); a third ("dataplane-helper") takes half of each '
    "block of 8 MiB or more"
)
ROUND_TRIPS = 2000
WIDTH = 170
TASKS = 100_000


def touch_memory(nbytes: int) -> None:
    """Make the host of the virtual machine back `nbytes` of its memory unless it already does so."""
    with mmap.mmap(-1, min(nbytes, psutil.virtual_memory().available * 3 // 4)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[::4096] = 1


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def blocks_of(tasks: list[TaskShards]) -> Iterator[list[memoryview]]:
    """Yield the bytes of each lease block, one piece per array."""
    for first in range(0, len(tasks), BLOCK_TASKS):
        block = [array for task in tasks[first : first + BLOCK_TASKS] for array in task.shards.values()]
        yield [memoryview(np.ascontiguousarray(array)).cast("B") for array in block]


def write_alone(tasks: list[TaskShards], folder: Path) -> float:
    """Return how long, in seconds, one thread takes to write the blocks to new files, with one write call per
    tensor."""

    def write(path: Path, block: list[memoryview]) -> None:
        with path.open("wb", buffering=0) as file:
            for piece in block:
                file.write(piece)

    return sum(
        seconds(partial(write, folder / f"limit-{number}", block)) for number, block in enumerate(blocks_of(tasks))
    )


def write_in_two(tasks: list[TaskShards], folder: Path) -> float:
    """Return how long, in seconds, two threads take to write the blocks to new files, with one writev per MAX_PIECES
    tensors.
    """
    blocks = [(folder / f"limit-{number}", block) for number, block in enumerate(blocks_of(tasks))]

    def write(named: tuple[Path, list[memoryview]]) -> None:
        path, block = named
        with path.open("wb", buffering=0) as file:
            for first in range(0, len(block), MAX_PIECES):
                pieces = block[first : first + MAX_PIECES]
                if os.writev(file.fileno(), pieces) != sum(map(len, pieces)):
                    raise OSError(f"{path}: a short write: the mount is full")

    with ThreadPoolExecutor(2) as pool:
        return seconds(lambda: list(pool.map(write, blocks)))


def remove_limits(folder: Path) -> None:
    for path in folder.glob("limit-*"):
        path.unlink()


def mmap_read(tasks: list[TaskShards], folder: Path) -> tuple[float, float]:
    """Return how long, in seconds, it takes to map the written files and read the same slices, and to read them again
    once mapped.
    """
    slices: list[Array] = []

    def cold() -> None:
        for number, first in enumerate(range(0, len(tasks), BLOCK_TASKS)):
            with (folder / f"limit-{number}").open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            offset = 0
            for task in tasks[first : first + BLOCK_TASKS]:
                for array in task.shards.values():
                    slices.append(np.frombuffer(mapped, array.dtype, array.size, offset))
                    digest(slices[-1])
                    offset += array.nbytes

    def warm() -> None:
        for each in slices:
            digest(each)

    return seconds(cold), seconds(warm)


async def time_puts(peer: Peer, tasks: list[TaskShards], folder: Path, turn: int) -> dict[str, float]:
    """Return how long, in seconds, our puts and their limits take, measured in the order of `turn`."""
    row: dict[str, float] = {}
    for side in order(("alone", "in_two", "put"), turn):
        if side == "put":
            began = time.perf_counter()
            await put_blocks(peer, tasks)
            row["put"] = time.perf_counter() - began
        else:
            row[side] = (write_alone if side == "alone" else write_in_two)(tasks, folder)
            remove_limits(folder)
    return row


async def time_gets(peer: Peer, work: Work, folder: Path, turn: int) -> dict[str, float]:
    """Return how long, in seconds, our gets of the same tasks and their limits take, measured in the order of
    `turn`."""
    tasks, _ = work
    row: dict[str, float] = {}
    write_in_two(tasks, folder)
    for side in order(("limits", "get"), turn):
        if side == "get":
            row["get"] = await timed_fetch(peer, work)
            row["again"] = await timed_fetch(peer, work)
        else:
            row["cold"], row["warm"] = mmap_read(tasks, folder)
    remove_limits(folder)
    return row


async def same_host(folder: Path, work: Work, firsts: int, rounds: int) -> tuple[Rows, Rows]:
    """Return how long, in seconds, our store and the limits take for the first put into each of `firsts` stores and for
    `rounds` later rounds of put and get in the last store.
    """
    tasks, keys = work
    first, later = [], []
    for number in range(firsts):
        async with fresh_store(folder / f"store-{number}", nbytes_of(tasks)) as (run, peer):
            first.append(await time_puts(peer, tasks, run.shm, number))
            if number < firsts - 1:
                continue
            await clear(peer, tasks)
            for turn in range(rounds):
                fenced = [TaskShards(task.task_id, turn + 2, task.shards) for task in tasks]
                row = await time_puts(peer, fenced, run.shm, turn)
                later.append({**row, **await time_gets(peer, (fenced, keys), run.shm, turn)})
                await clear(peer, fenced)
    return first, later


_SENDER = """
import socket, sys
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
print(listener.getsockname()[1], flush=True)
block = memoryview(bytearray(1 << 20))
while True:
    peer, _ = listener.accept(); left = int(sys.argv[1])
    while left: left -= peer.send(block[: min(left, 1 << 20)])
    peer.close()
"""


def raw_tcp(port: int, ring: memoryview) -> float:
    """Return how long, in seconds, it takes to receive all bytes from the sender into `ring`."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        began = time.perf_counter()
        at = 0
        while got := line.recv_into(ring[at : at + CHUNK]):
            at = (at + got) % len(ring)
        return time.perf_counter() - began


async def across_hosts(folder: Path, work: Work, rounds: int) -> list[dict[str, float]]:
    """Return how long, in seconds, an unencrypted and an encrypted stream take, each alternating with raw loopback TCP.

    The stores run one after the other, because two stores and the received data would need three times the memory of
    the work. `clear_beside` is the time of the unencrypted stream at the raw speed measured beside the encrypted one.
    """
    tasks, _ = work
    rows: Rows = [{} for _ in range(rounds)]
    command = [sys.executable, "-c", _SENDER, str(nbytes_of(tasks))]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = int((sender.stdout or sys.stdin).readline())
        for mode in ("clear", "sealed"):
            (folder / mode).mkdir()
            await one_way(folder / mode, work, mode, port, rows)
    finally:
        sender.terminate()
        sender.wait()
    for row in rows:
        row["clear_beside"] = row["clear"] * row["raw_sealed"] / row["raw_clear"]
    return rows


async def one_way(folder: Path, work: Work, mode: str, port: int, rows: Rows) -> None:
    """Add to each of `rows` how long, in seconds, the stream in `mode` and raw TCP from the sender at `port` take."""
    tasks, keys = work
    nbytes = nbytes_of(tasks)
    run = make_run(folder, memory=2 * nbytes)
    if mode == "clear":
        in_clear(run)
    program = [sys.executable, "-m", "tests.integration.stream_store"]
    store = subprocess.Popen([*program, "--run", str(run.path), "tcp://127.0.0.1:*", ""])
    try:
        async with peer_of(run) as peer:
            ring = memoryview(np.ones(min(nbytes, RING_BYTES), np.uint8)).cast("B")
            for first in range(0, len(tasks), BLOCK_TASKS):
                await peer.data.put(tasks[first : first + BLOCK_TASKS], store=STORE, deadline_s=60)
            client = DataClient(lambda service, instance: peer.store, reach=Reach.STREAM, plain=mode == "clear")
            meta = meta_of(tasks, keys)
            for turn, row in enumerate(rows):
                for side in order((f"raw_{mode}", mode), turn):
                    if side == mode:
                        began = time.perf_counter()
                        await client.fetch(meta, keys, deadline_s=120)
                        row[mode] = time.perf_counter() - began
                    else:
                        row[side] = await asyncio.to_thread(raw_tcp, port, ring)
            client.close()
    finally:
        store.terminate()
        store.wait()
        run.remove_volatile()


_ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER); router.bind(sys.argv[1])
while True: router.send_multipart(router.recv_multipart())
"""


async def round_trips(peer: Peer, folder: Path, count: int = ROUND_TRIPS) -> dict[str, float]:
    """Return the median durations, in seconds, of a bare DEALER/ROUTER echo and of a request to the store. They
    alternate in turns of 100.
    """
    endpoint = f"ipc://{folder}/echo"
    echo = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint])
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    bare: list[float] = []
    ours: list[float] = []
    try:
        for _ in range(count // 100):
            for _ in range(100):
                bare.append(seconds(lambda: (dealer.send(b"x" * 64), dealer.recv())))
            for _ in range(100):
                began = time.perf_counter()
                await peer.store.call(Ping(), Pong, deadline_s=5)
                ours.append(time.perf_counter() - began)
    finally:
        echo.kill()
        echo.wait()
        dealer.close(0)
        context.term()
    return {"bare": statistics.median(bare), "ours": statistics.median(ours)}


class Report:
    """The table that compares our figures with the limits: one line per figure and size."""

    def __init__(self) -> None:
        self.table = Table()
        for column in ("size", "what: limit", "n", "GB/s", "of the limit's GB/s", "ratio", "target"):
            self.table.add_column(column, justify="left" if column.startswith("what") else "right")

    def against(self, size: int, what: str, nbytes: int, rows: Rows, names: tuple[str, str], target: str) -> None:
        """Report the times of (ours, limit) in `rows` as speeds, with the ratio within each round."""
        speeds = [spread(nbytes / row[name] / 1e9 for row in rows) for name in names]
        found = ratios(speeds[0].values, speeds[1].values)
        self.table.add_row(f"{size}x", what, str(len(rows)), speeds[0].text(), speeds[1].text(), found.text(), target)


async def measure_size(size: int, firsts: int, rounds: int, report: Report, *, across: bool) -> None:
    """Measure all of our figures at one size. With `across`, also measure over TCP."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, make, target in (("regular", regular, "0.7"), ("ragged", ragged, "0.6")):
            work = make(size)
            nbytes = nbytes_of(work[0])
            (folder / label).mkdir()
            first, later = await same_host(folder / label, work, firsts, rounds)
            for what, rows in (("first put", first), ("later put", later)):
                report.against(size, f"{what}, {label}: writes, 1 thread", nbytes, rows, ("put", "alone"), target)
                report.against(size, f"{what}, {label}: writev, 2 threads", nbytes, rows, ("put", "in_two"), "")
            report.against(size, f"get + read, {label}: mmap, cold", nbytes, later, ("get", "cold"), "0.7")
            report.against(size, f"get + read, {label}: mmap, warm", nbytes, later, ("get", "warm"), "")
            report.against(size, f"get + read, {label}: get again", nbytes, later, ("get", "again"), "")
            if not across:
                continue
            (folder / f"{label}-tcp").mkdir()
            rows = (await across_hosts(folder / f"{label}-tcp", work, rounds + 1))[1:]
            report.against(size, f"TCP get unencrypted, {label}: raw TCP", nbytes, rows, ("clear", "raw_clear"), "0.7")
            report.against(size, f"TCP get encrypted, {label}: clear", nbytes, rows, ("sealed", "clear_beside"), "0.5")


async def measure_requests() -> None:
    with tempfile.TemporaryDirectory() as name:
        async with fresh_store(Path(name) / "store", 64 << 20) as (_, peer):
            found = await round_trips(peer, Path(name))
    ratio = found["ours"] / found["bare"]
    print(
        f"request: median {found['ours'] * 1e6:.0f} us, bare DEALER/ROUTER round trip: {found['bare'] * 1e6:.0f} us, "
        f"{ratio:.2f}x (target <= 2), {ROUND_TRIPS} each in turns of 100",
        flush=True,
    )


def measure_scheduler() -> None:
    """Measure the scheduler as a real process and its state machine alone."""
    for what, title in (("socket", "scheduler, over its socket"), ("state", "scheduler, its state machine alone")):
        print(title)
        print(scheduler_load.table([scheduler_load.in_own_process(what, TASKS)]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the data plane with limits and peers.")
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument(
        "--rounds", type=int, default=6, help="rounds at size 1; larger sizes have fewer, but at least three"
    )
    parser.add_argument(
        "--firsts", type=int, default=7, help="first puts at size 1; larger sizes have fewer, as with --rounds"
    )
    parser.add_argument("--peer-turns", type=int, default=TURNS, help="fresh starts of each peer and of our store")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only-peers", action="store_true", help="compare with the peers and measure nothing else")
    parser.add_argument("--across", action=argparse.BooleanOptionalAction, default=True, help="streams between hosts")
    parser.add_argument("--scheduler", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--sweep",
        nargs="*",
        choices=list(against_data_peers.PEERS),
        help="find the fastest settings of these peers, or of all, and record them",
    )
    options = parser.parse_args()
    if (options.peers or options.only_peers or options.sweep is not None) and not against_data_peers.PYTHON.exists():
        sys.exit("bench_data: .venv-data is missing; run `make peers-data` first, or use --no-peers")
    print(heading())
    touch_memory(4 * max(options.sizes) * nbytes_of(ragged(1)[0]))
    try:
        if options.sweep is not None:
            for system in options.sweep or against_data_peers.PEERS:
                against_data_peers.sweep(system, against_data_peers.ROUNDS)
            return
        if not options.only_peers:
            asyncio.run(measure_requests())
        if options.peers or options.only_peers:
            against_data_peers.measure(options.peer_turns, against_data_peers.ROUNDS)
        if options.only_peers:
            return
    except BenchError as error:
        sys.exit(f"bench_data: {error}")
    report = Report()
    print("against limits: ours and the limits alternate, in reverse order in every second turn; n turns")
    print(PUT_THREADS, flush=True)
    for size in options.sizes:
        rounds, firsts = (max(3, number // size) for number in (options.rounds, options.firsts))
        asyncio.run(measure_size(size, firsts, rounds, report, across=options.across))
    Console(width=WIDTH).print(report.table)
    if options.scheduler:
        measure_scheduler()


if __name__ == "__main__":
    main()
