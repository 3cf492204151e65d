"""The data plane against the machine's own limits and its peers, all in one run; absolute figures mean little alone.

`python -m tests.bench.bench_data [--scale N] [--rounds N] [--no-peers] [--no-scheduler]`. Real store process, real
client, RPC included. Regular work: 1024 tasks x 9 keys x 8192 float32 (302 MB); ragged: 8192 tasks x 6 keys of 0.5 to
4k tokens, put as lease blocks of 64 tasks. `--scale` multiplies the number of tasks.
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
import zmq
from rich.console import Console
from rich.table import Table

from proto.messages import Ack, BatchMeta, BatchPart, Clear, Ping, Pong, PutTask, TaskHandle
from proto.tensors import Array
from shared.dataplane.client import DataClient, TaskShards
from shared.dataplane.reach import Reach
from tests.bench import scheduler_load
from tests.integration.store_process import REPOSITORY, STORE, Peer, StoreProcess, make_run, peer_of

BLOCK_TASKS = 64
CHUNK = 1 << 20
PEERS = REPOSITORY / ".venv-data" / "bin" / "python"
Work = tuple[list[TaskShards], list[str]]


def regular(scale: int) -> Work:
    chance = np.random.default_rng(0)
    keys = [f"key_{index}" for index in range(9)]
    rows = chance.standard_normal((1024 * scale, len(keys), 8192), dtype=np.float32)
    return [TaskShards(f"train/0/{i}", 1, dict(zip(keys, row, strict=True))) for i, row in enumerate(rows)], keys


def ragged(scale: int) -> Work:
    """The shape of RL data: int32, float32 and uint8 by token."""
    lengths = np.random.default_rng(1).integers(500, 4000, 8192 * scale)
    dtypes = (np.int32, np.float32, np.uint8)
    keys = [f"key_{index}" for index in range(6)]
    return [
        TaskShards(f"train/1/{i}", 1, {key: np.full(int(n), i % 200, dtypes[j % 3]) for j, key in enumerate(keys)})
        for i, n in enumerate(lengths)
    ], keys


def nbytes_of(tasks: list[TaskShards]) -> int:
    return sum(array.nbytes for task in tasks for array in task.shards.values())


def meta_of(tasks: list[TaskShards], keys: list[str]) -> BatchMeta:
    handles = [TaskHandle(task.task_id, task.fence, stores=[0]) for task in tasks]
    return BatchMeta(tasks=handles, parts=[BatchPart("bench", keys)], stores=[STORE])


def read(tasks: list[dict[str, Array]]) -> float:
    """Touch every byte, slice by slice."""
    return sum(float(array.sum(dtype=np.float64)) for task in tasks for array in task.values())


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
    """Seconds to map those files and sum the same slices."""
    began = time.perf_counter()
    for first in range(0, len(tasks), BLOCK_TASKS):
        with (folder / f"limit-{first}").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        offset = 0
        for task in tasks[first : first + BLOCK_TASKS]:
            for array in task.shards.values():
                np.frombuffer(mapped, array.dtype, array.size, offset).sum(dtype=np.float64)
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
        began = time.perf_counter()
        read(await peer.data.fetch(meta_of(fenced, keys), keys, deadline_s=60))
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


def raw_tcp(port: int, nbytes: int) -> float:
    buffer = bytearray(CHUNK)
    with socket.create_connection(("127.0.0.1", port)) as line:
        return seconds(lambda: sum(iter(lambda: line.recv_into(buffer), 0)))


async def across_hosts(folder: Path, work: Work, rounds: int) -> list[dict[str, float]]:
    """Seconds of raw loopback TCP, a clear stream and an encrypted one, by turns."""
    tasks, keys = work
    nbytes, rows = nbytes_of(tasks), []
    runs = {}
    for mode in ("clear", "sealed"):
        (folder / mode).mkdir()
        runs[mode] = make_run(folder / mode, memory=3 * nbytes)
    command = [sys.executable, "-m", "tests.integration.stream_store"]
    processes = [
        subprocess.Popen([*command, str(run.path), "tcp://127.0.0.1:*", "", *(["plain"] if mode == "clear" else [])])
        for mode, run in runs.items()
    ]
    sender = subprocess.Popen([sys.executable, "-c", _SENDER, str(nbytes)], stdout=subprocess.PIPE, text=True)
    processes.append(sender)
    try:
        async with peer_of(runs["clear"]) as clear, peer_of(runs["sealed"]) as sealed:
            port = int((sender.stdout or sys.stdin).readline())
            clients = {}
            for mode, peer in (("clear", clear), ("sealed", sealed)):
                for first in range(0, len(tasks), BLOCK_TASKS):
                    await peer.data.put(tasks[first : first + BLOCK_TASKS], store=STORE, deadline_s=60)
                store = peer.store
                clients[mode] = DataClient(
                    lambda _service, _instance, store=store: store,
                    reach=Reach.STREAM,
                    plain=mode == "clear",
                    cache_bytes=0,
                )
            for _ in range(rounds):
                row = {"raw": await asyncio.to_thread(raw_tcp, port, nbytes)}
                for mode, client in clients.items():
                    began = time.perf_counter()
                    await client.fetch(meta_of(tasks, keys), keys, deadline_s=120)
                    row[mode] = time.perf_counter() - began
                rows.append(row)
            for client in clients.values():
                client.close()
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        for run in runs.values():
            run.remove_volatile()
    return rows


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


def peers(scale: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """What the peers need for the regular work, from their own environment."""
    script = REPOSITORY / "tests" / "bench" / "peers" / "data_peers.py"
    command = [str(PEERS), str(script), "--tasks", str(1024 * scale), "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=1200)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["system"]: line["rounds"] for line in lines}


def median(rows: list[dict[str, float]], ratio: Callable[[dict[str, float]], float]) -> float:
    return statistics.median(ratio(row) for row in rows)


async def measure(options: argparse.Namespace, table: Table) -> None:
    def add(what: str, value: str, ratio: float | None, floor: str) -> None:
        table.add_row(what, value, "" if ratio is None else f"{ratio:.2f}", floor)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = {"regular": regular(options.scale), "ragged": ragged(options.scale)}
        largest = max(nbytes_of(tasks) for tasks, _ in works.values())
        run = make_run(folder, memory=3 * largest)
        store = StoreProcess(run)
        store.start()
        ours: dict[str, list[dict[str, float]]] = {}
        try:
            async with peer_of(run) as peer:
                trips = await round_trips(peer, folder)
                for work, floor in (("regular", "0.7"), ("ragged", "0.5")):
                    nbytes = nbytes_of(works[work][0])
                    rows = ours[work] = await same_host(peer, works[work], run.shm, options.rounds)
                    warm = rows[1:] or rows
                    speed = {key: nbytes / median(warm, lambda row, key=key: row[key]) / 1e9 for key in rows[0]}
                    put, get = f"{speed['put']:.2f} of {speed['limit_put']:.2f}", f"{speed['get']:.2f}"
                    add(
                        f"put, {work}: GB/s of tmpfs write",
                        put,
                        median(warm, lambda r: r["limit_put"] / r["put"]),
                        floor,
                    )
                    get = f"{get} of {speed['limit_get']:.2f}"
                    add(
                        f"get + read, {work}: GB/s of mmap",
                        get,
                        median(warm, lambda r: r["limit_get"] / r["get"]),
                        "0.7",
                    )
        finally:
            store.process.terminate()
            store.process.communicate(timeout=20)
            run.remove_volatile()
        add(
            "round trip, us (bare DEALER/ROUTER)",
            f"{trips['ours'] * 1e6:.0f} ({trips['bare'] * 1e6:.0f})",
            trips["ours"] / trips["bare"],
            "<= 2",
        )
        for work in ("regular", "ragged"):
            rows = (await across_hosts(Path(tempfile.mkdtemp(dir=folder)), works[work], options.rounds + 1))[1:]
            nbytes = nbytes_of(works[work][0])
            speed = {key: nbytes / median(rows, lambda row, key=key: row[key]) / 1e9 for key in rows[0]}
            value = f"{speed['clear']:.2f} of {speed['raw']:.2f}"
            add(f"TCP get in clear, {work}: GB/s of raw", value, median(rows, lambda r: r["raw"] / r["clear"]), "0.7")
            value = f"{speed['sealed']:.2f}"
            add(f"TCP get encrypted, {work}: GB/s", value, median(rows, lambda r: r["clear"] / r["sealed"]), "0.5")
    if options.peers and PEERS.exists():
        mine, nbytes = ours["regular"], nbytes_of(works["regular"][0])
        both = median(mine[1:] or mine, lambda row: row["put"] + row["get"])
        for system, rows in peers(options.scale, options.rounds).items():
            warm = rows[1:] or rows
            value = f"{nbytes / median(warm, lambda r: r['put_s'] + r['get_read_s']) / 1e9:.2f}"
            floor = "4" if "Transfer" in system else ""
            add(
                f"put + get + read, {system}: GB/s, ours x",
                value,
                median(warm, lambda r: r["put_s"] + r["get_read_s"]) / both,
                floor,
            )
            first = rows[0]["put_s"] / mine[0]["put"]
            add(
                f"first put, {system}: GB/s, ours x",
                f"{nbytes / rows[0]['put_s'] / 1e9:.2f}",
                first,
                "" if floor else "2",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="the data plane against limits and peers")
    parser.add_argument("--scale", type=int, default=1, help="times the number of tasks")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--scheduler", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    table = Table(title=f"data plane, {options.scale}x, {os.cpu_count()} cores, load {load:.1f} before")
    for column in ("what", "figure", "ratio", "floor"):
        table.add_column(column, justify="left" if column == "what" else "right")
    asyncio.run(measure(options, table))
    Console(width=120).print(table)
    if options.peers and not PEERS.exists():
        print("peers left out: run `make peers-data` first")
    if options.scheduler:
        print(scheduler_load.table([scheduler_load.in_own_process("socket", 1_000_000 * options.scale)]))


if __name__ == "__main__":
    main()
