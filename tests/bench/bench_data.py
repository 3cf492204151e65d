"""The data plane against the machine's own limits and its peers, all in one run; absolute figures mean little alone.

`python -m tests.bench.bench_data [--sizes 1,4,16] [--rounds N] [--no-peers] [--no-scheduler] [--no-across]`. Real store
process, real client, RPC included. Regular work: 1024 tasks x 9 keys x 8192 float32 (302 MB); ragged: 8192 tasks x 6
keys of 0.5 to 4k tokens (332 MB), put as lease blocks of 64 tasks. A size multiplies the number of tasks (16: 4.8 GB,
of which three copies are in memory at a time); sizes above 1 put the same arrays under more names. Peers run at size 1,
and so does the scheduler's process, with a million tasks; its state machine alone runs at every size, in a million.

What is timed: `put`, from the call to the last receipt; `get + read`, same host: the fetch, and the xxh3 of each array
(the cheapest call that reads every byte: 13 GB/s, where a sum in float64 makes 4), on both sides, at the peers too. The
memory is touched once before, because the first use ever of a virtual machine's pages costs its host 1 to 2 s per GiB.
The first put is a line of its own, and the one to hold against its limit: both write into new pages. At later ones the
store lends the pages of what was collected, as in every step of a run but the first, and the limit writes new files
each time. `TCP get`: until every array is there
and checked, against plain `recv` of as many bytes from one connection into memory that was touched before (a ring of at
most 512 MB, because a hot buffer of one chunk would leave the cost of memory out); what came is read again on neither
side. The sender of that yardstick sends one hot block over and over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import xxhash
import zmq
from rich.console import Console
from rich.table import Table

from proto.messages import Ack, BatchMeta, BatchPart, Clear, Ping, Pong, PutTask, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import DataClient, TaskShards
from shared.dataplane.reach import Reach
from tests.bench import scheduler_load
from tests.integration.store_process import REPOSITORY, STORE, Peer, StoreProcess, make_run, peer_of
from tests.integration.stream_line import in_clear

BLOCK_TASKS = 64
CHUNK = 1 << 20
RING_BYTES = 512 << 20
PEERS_S = 300
TASKS = 1_000_000
TASK_BYTES = 512
"""What the scheduler may need for each: the limit."""
PEERS = REPOSITORY / ".venv-data" / "bin" / "python"
_digest = xxhash.xxh3_64_intdigest
Work = tuple[list[TaskShards], list[str]]


def regular(size: int) -> Work:
    keys = [f"key_{index}" for index in range(9)]
    rows = np.random.default_rng(0).standard_normal((1024, len(keys), 8192), dtype=np.float32)
    shards = [dict(zip(keys, row, strict=True)) for row in rows]
    return [TaskShards(f"train/0/{i}", 1, shards[i % len(shards)]) for i in range(len(shards) * size)], keys


def ragged(size: int) -> Work:
    """The shape of RL data: int32, float32 and uint8 by token."""
    lengths = np.random.default_rng(1).integers(500, 4000, 8192)
    dtypes = (np.int32, np.float32, np.uint8)
    keys = [f"key_{index}" for index in range(6)]
    shards = [
        {key: np.full(int(n), i % 200, dtypes[j % 3]) for j, key in enumerate(keys)} for i, n in enumerate(lengths)
    ]
    return [TaskShards(f"train/1/{i}", 1, shards[i % len(shards)]) for i in range(len(shards) * size)], keys


def nbytes_of(tasks: list[TaskShards]) -> int:
    return sum(array.nbytes for task in tasks for array in task.shards.values())


def meta_of(tasks: list[TaskShards], keys: list[str]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("bench", keys)], stores=[STORE])


def read(tasks: list[dict[str, Array]]) -> None:
    """Every byte, slice by slice."""
    for task in tasks:
        for array in task.values():
            _digest(array)


def touch_memory(nbytes: int) -> None:
    """Make the machine's host back so much memory, if it does not yet."""
    with mmap.mmap(-1, min(nbytes, psutil.virtual_memory().available * 3 // 4)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[::4096] = 1


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tmpfs_write(tasks: list[TaskShards], folder: Path) -> float:
    """Seconds to write the same blocks into fresh files of the same mount, one write call a tensor, no checksum."""
    total = 0.0
    for first in range(0, len(tasks), BLOCK_TASKS):
        block = [np.ascontiguousarray(a) for task in tasks[first : first + BLOCK_TASKS] for a in task.shards.values()]
        path = folder / f"limit-{first}"

        def write(path: Path = path, block: list[Array] = block) -> None:
            with path.open("wb", buffering=0) as file:
                for array in block:
                    file.write(memoryview(array).cast("B"))

        total += seconds(write)
    return total


def mmap_read(tasks: list[TaskShards], folder: Path) -> float:
    """Seconds to map those files and read the same slices."""
    began = time.perf_counter()
    for first in range(0, len(tasks), BLOCK_TASKS):
        with (folder / f"limit-{first}").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        offset = 0
        for task in tasks[first : first + BLOCK_TASKS]:
            for array in task.shards.values():
                _digest(np.frombuffer(mapped, array.dtype, array.size, offset))
                offset += array.nbytes
    return time.perf_counter() - began


async def put_blocks(peer: Peer, tasks: list[TaskShards]) -> None:
    """Lease blocks, two under way at a time, as a rollout service has them."""
    room = asyncio.Semaphore(2)

    async def put(first: int) -> None:
        async with room:
            await peer.data.put(tasks[first : first + BLOCK_TASKS], store=STORE, deadline_s=60)

    await asyncio.gather(*(put(first) for first in range(0, len(tasks), BLOCK_TASKS)))


async def same_host(peer: Peer, work: Work, folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of the limits and of ours, by turns; the first round is the first use of the memory."""
    tasks, keys = work
    rows = []
    for turn in range(rounds):
        row = {"limit_put": tmpfs_write(tasks, folder), "limit_get": mmap_read(tasks, folder)}
        for path in folder.glob("limit-*"):
            path.unlink()
        fenced = [TaskShards(task.task_id, turn + 1, task.shards) for task in tasks]
        began = time.perf_counter()
        await put_blocks(peer, fenced)
        row["put"] = time.perf_counter() - began
        meta = meta_of(fenced, keys)
        began = time.perf_counter()
        read(await peer.data.fetch(meta, keys, deadline_s=60))
        row["get"] = time.perf_counter() - began
        for first in range(0, len(fenced), 1000):
            gone = [PutTask(task.task_id, task.fence) for task in fenced[first : first + 1000]]
            await peer.store.call(Clear(tasks=gone), Ack, deadline_s=60)
        rows.append(row)
    return rows


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
    """Seconds to receive all that the sender sends, one place of `ring` after the other."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        began = time.perf_counter()
        at = 0
        while got := line.recv_into(ring[at : at + CHUNK]):
            at = (at + got) % len(ring)
        return time.perf_counter() - began


async def across_hosts(folder: Path, work: Work, rounds: int) -> list[dict[str, float]]:
    """Seconds of a clear stream and of an encrypted one, each by turns with raw loopback TCP.

    One store after the other: together with what arrives, two would take three times the work's memory. `clear_beside`
    is the clear stream at the raw speed that was measured beside the encrypted one.
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
    """Into each of `rows`: the stream of that `mode` and the raw line of the sender at `port`."""
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
            for row in rows:
                row[f"raw_{mode}"] = await asyncio.to_thread(raw_tcp, port, ring)
                began = time.perf_counter()
                await client.fetch(meta, keys, deadline_s=120)
                row[mode] = time.perf_counter() - began
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


async def round_trips(peer: Peer, folder: Path, count: int = 2000) -> dict[str, float]:
    """Median seconds of a bare DEALER/ROUTER echo and of a request to the store, in turns of 100."""
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


def peers(rounds: int) -> dict[str, list[dict[str, float]]]:
    """What the peers need for the regular work, from their own environment; those that come to an end in time."""
    script = REPOSITORY / "tests" / "bench" / "peers" / "data_peers.py"
    command = [str(PEERS), str(script), "--tasks", "1024", "--rounds", str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            out, _ = process.communicate(timeout=PEERS_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, _ = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line["system"]: line["rounds"] for line in lines}


def median(rows: list[dict[str, float]], ratio: Callable[[dict[str, float]], float]) -> float:
    return statistics.median(ratio(row) for row in rows)


Rows = list[dict[str, float]]


class Report:
    """The table: one line a figure and size."""

    def __init__(self) -> None:
        load = os.getloadavg()[0]
        self.table = Table(title=f"data plane, {os.cpu_count()} cores, load {load:.1f} before")
        for column in ("size", "what", "GB/s (of the limit)", "seconds", "ratio", "floor"):
            self.table.add_column(column, justify="left" if column == "what" else "right")

    def add(self, size: str, what: str, figure: str, seconds_: float | None, ratio: float, floor: str) -> None:
        self.table.add_row(size, what, figure, "" if seconds_ is None else f"{seconds_:.3f}", f"{ratio:.2f}", floor)

    def against(self, size: int, what: str, nbytes: int, rows: Rows, names: tuple[str, str], floor: str) -> None:
        """Seconds of (ours, limit) in `rows`: median speed of both, median ratio."""
        mine, limit = names
        took = median(rows, lambda row: row[mine])
        speeds = [nbytes / median(rows, lambda row, name=name: row[name]) / 1e9 for name in names]
        ratio = median(rows, lambda row: row[limit] / row[mine])
        self.add(f"{size}x", what, f"{speeds[0]:.2f} of {speeds[1]:.2f}", took, ratio, floor)


async def measure_size(size: int, rounds: int, report: Report, *, across: bool) -> Rows:
    """Every figure of ours at one size; returns the rounds of the regular work on one host.

    `across`: also what crosses a line.
    """
    mine: Rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, make, floor in (("regular", regular, "0.7"), ("ragged", ragged, "0.5")):
            work = make(size)
            nbytes = nbytes_of(work[0])
            (folder / label).mkdir()
            run = make_run(folder / label, memory=3 * nbytes)
            store = StoreProcess(run)
            store.start()
            try:
                async with peer_of(run) as peer:
                    if size == 1 and label == "regular":
                        trips = await round_trips(peer, folder)
                        value = f"{trips['ours'] * 1e6:.0f} us of {trips['bare'] * 1e6:.0f}"
                        ratio = trips["ours"] / trips["bare"]
                        report.add("", "round trip (bare DEALER/ROUTER)", value, None, ratio, "<= 2")
                    rows = await same_host(peer, work, run.shm, max(rounds, 3))
            finally:
                store.process.terminate()
                store.process.communicate(timeout=20)
                run.remove_volatile()
            mine = mine or rows
            warm = rows[1:] or rows
            for name, some, least in (("first put", rows[:1], floor), ("put", warm, floor)):
                report.against(size, f"{name}, {label}: tmpfs write", nbytes, some, ("put", "limit_put"), least)
            report.against(size, f"get + read, {label}: mmap read", nbytes, warm, ("get", "limit_get"), "0.7")
            if not across:
                continue
            (folder / f"{label}-tcp").mkdir()
            rows = (await across_hosts(folder / f"{label}-tcp", work, rounds + 1))[1:]
            report.against(size, f"TCP get in clear, {label}: raw TCP", nbytes, rows, ("clear", "raw_clear"), "0.7")
            report.against(size, f"TCP get encrypted, {label}: clear", nbytes, rows, ("sealed", "clear_beside"), "0.5")
    return mine


def measure_peers(mine: Rows, rounds: int, report: Report) -> None:
    nbytes = nbytes_of(regular(1)[0])
    both = median(mine[1:] or mine, lambda row: row["put"] + row["get"])
    for system, rows in peers(rounds).items():
        took = median(rows[1:] or rows, lambda row: row["put_s"] + row["get_read_s"])
        floor = "4" if "Transfer" in system else ""
        report.add("1x", f"put + get + read, {system}: ours x", f"{nbytes / took / 1e9:.2f}", took, took / both, floor)
        first = rows[0]["put_s"]
        ratio = first / mine[0]["put"]
        report.add(
            "1x", f"first put, {system}: ours x", f"{nbytes / first / 1e9:.2f}", first, ratio, "" if floor else "2"
        )


def measure_scheduler(sizes: list[int]) -> None:
    """A million tasks and the real process; then as many millions as there are sizes, the state machine alone."""
    print("scheduler, over its socket")
    print(scheduler_load.table([scheduler_load.in_own_process("socket", TASKS)]))
    rows: list[scheduler_load.Figures] = []
    for size in sizes:
        need, free = size * TASKS * TASK_BYTES, psutil.virtual_memory().available
        if need > free:
            print(f"{size * TASKS} tasks left out: they take about {need >> 20} MiB, {free >> 20} are available")
            continue
        rows.append(scheduler_load.in_own_process("state", size * TASKS))
    print("scheduler, its state machine alone")
    print(scheduler_load.table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="the data plane against limits and peers")
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument(
        "--rounds", type=int, default=4, help="at size 1; larger ones have fewer, two at least (three on one host)"
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--across", action=argparse.BooleanOptionalAction, default=True, help="streams between hosts")
    parser.add_argument("--scheduler", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    report = Report()
    first: Rows = []
    touch_memory(4 * max(options.sizes) * nbytes_of(ragged(1)[0]))
    for size in options.sizes:
        rows = asyncio.run(measure_size(size, max(2, options.rounds // size), report, across=options.across))
        first = rows if size == 1 else first
    if options.peers and PEERS.exists() and first:
        measure_peers(first, options.rounds, report)
    Console(width=120).print(report.table)
    if options.peers and not PEERS.exists():
        print("peers left out: run `make peers-data` first")
    if options.scheduler:
        measure_scheduler(options.sizes)


if __name__ == "__main__":
    main()
