"""Measures newly started Ray object stores and TransferQueue SimpleStorages on the data of `tests.bench.bench_data`.
Prints one JSON line.

    .venv-data/bin/python tests/bench/peers/data_peers.py ray|transfer-queue [--settings '{"threads": 2}'] [--rounds N]

Runs in its own environment (`make peers-data`; its lock file is beside this file). The work is `tasks` tasks of `keys`
float32 tensors of length `length`, which are put, fetched and hashed (xxh3) as in `bench_data`. The first round is the
first use of a fresh store. `SETTINGS` holds the defaults; data_sweep.json records which settings are fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import numpy as np
import psutil
from xxhash import xxh3_64_intdigest as digest

BLOCK_TASKS = 64
"""Tasks per block, the same number that `bench_data` puts at once."""
SETTINGS: dict[str, dict[str, Any]] = {
    "ray": {"threads": 2},  # Two threads put blocks, as in rlbus.
    # These are TransferQueue's defaults.
    "transfer-queue": {"threads": 8, "io_threads": 8, "units": 2, "blocks": False},
}
QUIET_S, QUIET_CORES, SETTLE_S = 1.0, 0.05, 60.0
Round = dict[str, float]


def settle() -> None:
    """Wait until the processes that Ray started have finished their imports. Raises SystemExit after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    before = _children_cpu_s()
    while time.monotonic() < until:
        time.sleep(QUIET_S)  # CPU time is measured over this interval.
        now = _children_cpu_s()
        if now - before < QUIET_CORES * QUIET_S:
            return
        before = now
    raise SystemExit(f"data_peers: Ray's processes are still busy after {SETTLE_S:g} s")


def _children_cpu_s() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(
    put: Callable[[int], None],
    got_back: Callable[[int], list[int]],
    clear: Callable[[int], None],
    sums: list[int],
    rounds: int,
) -> list[Round]:
    """Return how long, in seconds, `put(round)` and `got_back(round)` take. `got_back` reads every byte and returns the
    digests.
    """
    results = []
    for number in range(rounds):
        began = time.perf_counter()
        put(number)
        put_s = time.perf_counter() - began
        began = time.perf_counter()
        found = got_back(number)
        results.append({"put_s": put_s, "get_read_s": time.perf_counter() - began})
        if found != sums:
            raise SystemExit("data_peers: what came back is not what was put")
        clear(number)
    return results


def ray_store(arrays: dict[str, np.ndarray], settings: dict[str, Any], rounds: int) -> list[Round]:
    """Measure Ray with one object per block of tasks (a list of dicts of tensors), put by `threads` threads."""
    import ray

    tasks = len(next(iter(arrays.values())))
    rows = [{key: values[task] for key, values in arrays.items()} for task in range(tasks)]
    references: list[Any] = []

    def put(_: int) -> None:
        references[:] = pool.map(ray.put, (rows[first : first + BLOCK_TASKS] for first in range(0, tasks, BLOCK_TASKS)))

    def got_back(_: int) -> list[int]:
        return [digest(values) for block in ray.get(references) for row in block for values in row.values()]

    sums = [digest(values) for row in rows for values in row.values()]
    with ThreadPoolExecutor(settings["threads"]) as pool:
        return measure(put, got_back, lambda _: references.clear(), sums, rounds)


def transfer_queue(arrays: dict[str, np.ndarray], settings: dict[str, Any], rounds: int) -> list[Round]:
    """Measure `kv_batch_put` of all tasks at once, as TransferQueue's own performance test does, or of one block at a
    time."""
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": settings["units"]}}}))
    settle()
    tasks = len(next(iter(arrays.values())))
    size = BLOCK_TASKS if settings["blocks"] else tasks
    starts = range(0, tasks, size)
    fields = [
        TensorDict({key: torch.from_numpy(values[at : at + size]) for key, values in arrays.items()}, batch_size=size)
        for at in starts
    ]

    def names(number: int, first: int) -> list[str]:
        return [f"{number}_{task}" for task in range(first, first + size)]

    def put(number: int) -> None:
        for first, each in zip(starts, fields, strict=True):
            tq.kv_batch_put(keys=names(number, first), partition_id="bench", fields=each)

    def got_back(number: int) -> list[int]:
        found = []
        for first in starts:
            back = tq.kv_batch_get(keys=names(number, first), partition_id="bench")
            # Fields come back as nested tensors. They are unbound once, because every back[key][task] would unbind
            # everything again.
            found += [digest(row.numpy()) for key in arrays for row in back[key].unbind()]
        return found

    def clear(number: int) -> None:
        for first in starts:
            tq.kv_clear(keys=names(number, first), partition_id="bench")

    sums = [digest(row) for at in starts for values in arrays.values() for row in values[at : at + size]]
    results = measure(put, got_back, clear, sums, rounds)
    tq.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a peer of the data plane and prints one JSON line.")
    parser.add_argument("system", choices=tuple(SETTINGS))
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="JSON object of settings that replace the defaults"
    )
    parser.add_argument("--tasks", type=int, default=1024)
    parser.add_argument("--keys", type=int, default=9)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = {**SETTINGS[options.system], **options.settings}
    if options.tasks % BLOCK_TASKS or settings.keys() != SETTINGS[options.system].keys():
        parser.error(f"--tasks must be a multiple of {BLOCK_TASKS}; --settings accepts {SETTINGS[options.system]}")
    generator = np.random.default_rng(0)
    arrays = {
        f"key{index}": generator.standard_normal((options.tasks, options.length), dtype=np.float32)
        for index in range(options.keys)
    }
    nbytes = sum(values.nbytes for values in arrays.values())
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cores = len(os.sched_getaffinity(0))
    if options.system == "transfer-queue":
        # The package and its storage units, which inherit the environment, read the variable when they are imported.
        os.environ["TQ_NUM_THREADS"] = str(settings["threads"])
        os.environ["TQ_CLIENT_ZMQ_IO_THREADS"] = str(settings["io_threads"])
        cores = max(cores, settings["units"] + 1)  # The controller and each unit ask Ray for one core.
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=cores,
            object_store_memory=max(4 * nbytes, 200 << 20),
            include_dashboard=False,
            _temp_dir=folder,
            namespace="bench",
            log_to_driver=False,
        )
        settle()
        run = {"ray": ray_store, "transfer-queue": transfer_queue}[options.system]
        rounds = run(arrays, settings, options.rounds)
        ray.shutdown()
    packages = ("ray", "TransferQueue")
    print(
        json.dumps(
            {
                "system": options.system,
                "settings": settings,
                "software": ", ".join(f"{name} {metadata.version(name)}" for name in packages),
                "bytes": nbytes,
                "rounds": rounds,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
