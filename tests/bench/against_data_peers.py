"""Compares the data plane with its peers, Ray's object store and TransferQueue, each in newly started processes."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.dataplane.client import TaskShards
from tests.bench.cluster_run import BenchError, last_line
from tests.bench.data_work import Rows, clear, fresh_store, nbytes_of, put_blocks, regular, timed_fetch
from tests.bench.turns import by_turns, machine, order_line, ratios, spread, versions
from tests.integration.store_process import REPOSITORY

ROUNDS = 5
LIMIT_S = 300
WIDTH = 170
PYTHON = REPOSITORY / ".venv-data" / "bin" / "python"
SCRIPT = Path(__file__).parent / "peers" / "data_peers.py"
RECORD = Path(__file__).parent / "peers" / "data_sweep.json"
OURS = "rlbus"
SWEPT: dict[str, dict[str, list[Any]]] = {
    "ray": {"threads": [1, 2]},
    "transfer-queue": {"threads": [1, 8], "io_threads": [1, 8], "units": [2, 4], "blocks": [False, True]},
}
"""The peers' settings to try. `peers/data_peers.py` describes them."""
GOALS = {"steady put + get + read": "10 over transfer-queue"}


def peer_rounds(system: str, settings: Mapping[str, Any], rounds: int) -> Rows:
    """Return how long, in seconds, a newly started peer takes in its own environment. Raises BenchError."""
    command = [str(PYTHON), str(SCRIPT), system, "--rounds", str(rounds), "--settings", json.dumps(settings)]
    found: Rows = last_line(command, system, LIMIT_S)["rounds"]
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


def sweep(rounds: int) -> None:
    """Run all settings of SWEPT and record their times, in seconds, in RECORD."""
    recorded: dict[str, Any] = {"machine": machine(), "software": software()}
    for system, choices in SWEPT.items():
        recorded[system] = []
        for values in product(*choices.values()):
            settings = dict(zip(choices, values, strict=True))
            rows = peer_rounds(system, settings, rounds)
            recorded[system].append({"settings": settings, "rounds": rows})
            print(f"{system} {settings}: {steady_s(rows):.3f} s steady, first put {rows[0]['put_s']:.3f} s", flush=True)
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"recorded in {RECORD.relative_to(REPOSITORY)}")


def software() -> str:
    return versions(("ray", "TransferQueue", "torch"), PYTHON.parents[1])


def measure(turns: int, rounds: int) -> None:
    """Print the first and the steady figures of our store and both peers. Raises BenchError."""
    if not RECORD.exists():
        raise BenchError(f"{RECORD.relative_to(REPOSITORY)} is missing: run this command with --sweep")
    record = json.loads(RECORD.read_text())
    sides: dict[str, Callable[[], Rows]] = {OURS: partial(our_rounds, rounds)}
    for system in SWEPT:
        settings = min(record[system], key=lambda each: steady_s(each["rounds"]))["settings"]
        sides[system] = partial(peer_rounds, system, settings, rounds)
        print(f"{system}: {settings}, fastest of {len(record[system])} in {RECORD.relative_to(REPOSITORY)}")
    print(f"recorded on {record['machine']}; {software()}")
    print(order_line(sides, turns), flush=True)
    Console(width=WIDTH).print(comparison(by_turns(sides, turns), turns, rounds))


def comparison(results: Mapping[str, list[Rows]], turns: int, rounds: int) -> Table:
    """Return the table of all sides, with the ratios and the goals."""
    nbytes = nbytes_of(regular(1)[0])
    table = Table(title=f"{turns} fresh starts of each, {rounds} rounds in each; steady: all but the first round")
    for column in ("GB/s", *results, *(f"ours over {system}" for system in SWEPT), "goal"):
        table.add_column(column, justify="left" if column == "GB/s" else "right")
    figures: dict[str, Callable[[Rows], float]] = {
        "first put": lambda rows: rows[0]["put_s"],
        "steady put": lambda rows: statistics.median(row["put_s"] for row in rows[1:]),
        "steady get + read": lambda rows: statistics.median(row["get_read_s"] for row in rows[1:]),
        "steady put + get + read": steady_s,
    }
    for what, figure in figures.items():
        speeds = {side: spread(nbytes / figure(rows) / 1e9 for rows in runs) for side, runs in results.items()}
        over = [ratios(speeds[OURS].values, speeds[system].values).text() for system in SWEPT]
        table.add_row(what, *(each.text() for each in speeds.values()), *over, GOALS.get(what, ""))
    return table
