"""Compares the data plane with its peers, Ray's object store and TransferQueue, each in newly started processes.

Peers run with the settings that a recorded sweep found fastest (`peer_sweep`); `peers/data_peers.py` describes them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shared.dataplane.client import TaskShards
from tests.bench.cluster_run import last_line
from tests.bench.data_work import Rows, clear, fresh_store, nbytes_of, put_blocks, regular, timed_fetch
from tests.bench.peer_sweep import Axes, recorded_best, save, search, text
from tests.bench.turns import by_turns, order_line, ratios, spread, versions
from tests.integration.store_process import REPOSITORY

ROUNDS = 5
LIMIT_S = 600
PYTHON = REPOSITORY / ".venv-data" / "bin" / "python"
SCRIPT = Path(__file__).parent / "peers" / "data_peers.py"
RECORD = Path(__file__).parent / "peers" / "data_sweep.json"
OURS = "rlbus"
TASKS = 1024


@dataclass(frozen=True)
class RaySettings:
    """Threads that put blocks, and the number of tasks whose arrays are one object."""

    threads: int
    block_tasks: int


@dataclass(frozen=True)
class TransferQueueSettings:
    """TransferQueue's threads, the I/O threads of its sockets, its storage units, and the number of tasks per call."""

    threads: int
    io_threads: int
    units: int
    block_tasks: int


DataSettings = RaySettings | TransferQueueSettings


@dataclass(frozen=True)
class DataPeer:
    """A peer with its axes, the settings with which its sweep starts, and its goal for the whole, if there is one."""

    title: str
    axes: Axes
    start: tuple[DataSettings, ...]
    goal: float | None = None


PEERS = {
    "ray": DataPeer(
        "Ray",
        {"threads": (1, 32), "block_tasks": (8, TASKS)},
        tuple(RaySettings(threads, size) for threads in (1, 2) for size in (64, 256, TASKS)),
    ),
    "transfer-queue": DataPeer(
        "TransferQueue",
        {"threads": (1, 64), "io_threads": (1, 64), "units": (1, 64), "block_tasks": (8, TASKS)},
        (
            TransferQueueSettings(8, 8, 2, TASKS),  # its defaults
            *(TransferQueueSettings(1, 8, units, TASKS) for units in (1, 4, 16)),
        ),
        goal=10,
    ),
}


def peer_rounds(system: str, settings: DataSettings, rounds: int) -> Rows:
    """Return how long, in seconds, a newly started peer takes in its own environment. Raises BenchError."""
    command = [str(PYTHON), str(SCRIPT), system, "--rounds", str(rounds), "--tasks", str(TASKS)]
    found: Rows = last_line([*command, "--settings", json.dumps(asdict(settings))], system, LIMIT_S)["rounds"]
    return found


def our_rounds(rounds: int) -> Rows:
    """Return how long, in seconds, a newly started store takes for the same work."""

    async def run() -> Rows:
        tasks, keys = regular(1)
        rows: Rows = []
        with tempfile.TemporaryDirectory() as name:
            async with fresh_store(Path(name) / "store", nbytes_of(tasks)) as (_, peer):
                for turn in range(rounds):
                    fenced = [TaskShards(task.task_id, turn + 1, task.shards) for task in tasks]
                    began = time.perf_counter()
                    await put_blocks(peer, fenced)
                    put_s = time.perf_counter() - began
                    rows.append({"put_s": put_s, "get_read_s": await timed_fetch(peer, (fenced, keys))})
                    await clear(peer, fenced)
        return rows

    return asyncio.run(run())


def steady_s(rows: Rows) -> float:
    """Return the median duration of put, get and read, in seconds, over every round but the first."""
    return statistics.median(row["put_s"] + row["get_read_s"] for row in rows[1:])


def sweep(system: str, rounds: int) -> None:
    """Find the settings with which a peer's put, get and read are fastest, and record what was measured."""
    peer, nbytes = PEERS[system], nbytes_of(regular(1)[0])
    measured = search(
        peer.start,
        peer.axes,
        lambda settings: nbytes / steady_s(peer_rounds(system, settings, rounds)) / 1e9,
        show=lambda settings, run: print(
            f"{peer.title} {text(settings)}: {run.rate:.3f} GB/s, others' cores {run.others_cores:.2f}", flush=True
        ),
    )
    save(RECORD, system, measured, software(), unit="GB/s", rounds=rounds)
    print(best_of(system)[1])


def best_of(system: str) -> tuple[DataSettings, str]:
    """Return the recorded best settings and a line that says which they are. Raises BenchError."""
    peer = PEERS[system]
    return recorded_best(RECORD, system, type(peer.start[0]), peer.axes)


def software() -> str:
    return versions(("ray", "TransferQueue", "torch"), PYTHON.parents[1])


def measure(turns: int, rounds: int) -> None:
    """Print the first and the steady figures of our store and both peers. Raises BenchError."""
    sides: dict[str, Callable[[], Rows]] = {OURS: partial(our_rounds, rounds)}
    for system, peer in PEERS.items():
        settings, line = best_of(system)
        sides[system] = partial(peer_rounds, system, settings, rounds)
        print(f"{peer.title}: {line}")
    print(software())
    print(order_line(sides, turns), flush=True)
    print(f"{turns} fresh starts of each, {rounds} rounds in each; later: all but the first round; GB/s")
    print("\n".join(comparison(by_turns(sides, turns))))


def comparison(results: Mapping[str, list[Rows]]) -> Iterator[str]:
    """Yield the lines of the table of all sides, with the ratios and the goals."""
    nbytes = nbytes_of(regular(1)[0])
    titles = [peer.title for peer in PEERS.values()]
    columns = ["what", OURS, *titles, *(f"relative to {title}" for title in titles)]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    figures: dict[str, Callable[[Rows], float]] = {
        "first put": lambda rows: rows[0]["put_s"],
        "later puts": lambda rows: statistics.median(row["put_s"] for row in rows[1:]),
        "get and read every byte": lambda rows: statistics.median(row["get_read_s"] for row in rows[1:]),
        "put, get and read": steady_s,
    }
    for what, figure in figures.items():
        speeds = {side: spread(nbytes / figure(rows) / 1e9 for rows in runs) for side, runs in results.items()}
        cells = [what, *(each.text() for each in speeds.values())]
        for system, peer in PEERS.items():
            goal = f" (goal: {peer.goal:g})" if peer.goal and figure is steady_s else ""
            cells.append(ratios(speeds[OURS].values, speeds[system].values).text() + goal)
        yield f"| {' | '.join(cells)} |"
