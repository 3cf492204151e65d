"""Measures newly started Ray object stores and TransferQueue SimpleStorages on the data of `tests.bench.bench_data`.
Prints one JSON line.

    .venv-data/bin/python tests/bench/peers/data_peers.py ray|transfer-queue [--settings '{"threads": 2}'] [--rounds N]

Runs in its own environment (`make peers-data`; its lock file is beside this file). The work is `tasks` tasks of `keys`
float32 tensors of length `length`, which are put, fetched and hashed (xxh3) as in `bench_data`. Both systems get one
array per key and block of tasks; a block has `block_tasks` of them. The first round is the first use of a fresh store.
`SETTINGS` holds the defaults; data_sweep.json records which settings are fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import numpy as np
import psutil
from xxhash import xxh3_64_intdigest as digest

SETTINGS: dict[str, dict[str, int]] = {
    "ray": {"threads": 2, "block_tasks": 64},  # as rlbus puts lease blocks
    # TransferQueue's defaults, and one block of all tasks, as in its own performance test.
    "transfer-queue": {"threads": 8, "io_threads": 8, "units": 2, "block_tasks": 1024},
}
QUIET_S, QUIET_CORES, SETTLE_S = 1.0, 0.02, 240.0
"""Ray's processes have finished their imports once each uses at most QUIET_CORES on average: idle ones poll."""
Round = dict[str, float]
Block = dict[str, np.ndarray]
"""One array for each key, with a row for each task of the block."""


def settle() -> None:
    """Wait until the processes that Ray started have finished their imports. Raises SystemExit after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    before = _children_cpu_s()
    while time.monotonic() < until:
        time.sleep(QUIET_S)  # CPU time is measured over this interval.
        now = _children_cpu_s()
        if sum(now) - sum(before) < QUIET_CORES * QUIET_S * len(now):
            return
        before = now
    raise SystemExit(f"data_peers: Ray's processes are still busy after {SETTLE_S:g} s")


def _children_cpu_s() -> list[float]:
    """Return the processor time of each process that this one started, directly or not."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found.append(times.user + times.system)
    return found


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


def digests(blocks: Iterable[Mapping[str, Iterable[np.ndarray]]]) -> list[int]:
    """Read every byte: return the digest of each task's tensor, key by key within a block."""
    return [digest(row) for block in blocks for rows in block.values() for row in rows]


def ray_store(blocks: list[Block], settings: dict[str, Any], rounds: int) -> list[Round]:
    """Measure Ray with one object per block, put by `threads` threads. The tensors that come back are views of the
    object store's memory."""
    import ray

    references: list[Any] = []

    def put(_: int) -> None:
        references[:] = pool.map(ray.put, blocks)

    with ThreadPoolExecutor(settings["threads"]) as pool:
        return measure(
            put, lambda _: digests(ray.get(references)), lambda _: references.clear(), digests(blocks), rounds
        )


def transfer_queue(blocks: list[Block], settings: dict[str, Any], rounds: int) -> list[Round]:
    """Measure `kv_batch_put` and `kv_batch_get` of one block after the other. TransferQueue's own performance test has
    one block."""
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": settings["units"]}}}))
    settle()
    size = settings["block_tasks"]
    fields = [
        TensorDict({key: torch.from_numpy(rows) for key, rows in block.items()}, batch_size=size) for block in blocks
    ]

    def names(number: int, block: int) -> list[str]:
        return [f"{number}_{task}" for task in range(block * size, (block + 1) * size)]

    def put(number: int) -> None:
        for block, each in enumerate(fields):
            tq.kv_batch_put(keys=names(number, block), partition_id="bench", fields=each)

    def got_back(number: int) -> list[int]:
        found = []
        for block, given in enumerate(blocks):
            back = tq.kv_batch_get(keys=names(number, block), partition_id="bench")
            # Fields come back as nested tensors. They are unbound once, because every back[key][task] would unbind
            # everything again.
            found += digests([{key: [row.numpy() for row in back[key].unbind()] for key in given}])
        return found

    def clear(number: int) -> None:
        for block in range(len(blocks)):
            tq.kv_clear(keys=names(number, block), partition_id="bench")

    results = measure(put, got_back, clear, digests(blocks), rounds)
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
    if settings.keys() != SETTINGS[options.system].keys() or options.tasks % settings["block_tasks"]:
        parser.error(
            f"--settings accepts {SETTINGS[options.system]}, and block_tasks must divide {options.tasks} tasks"
        )
    generator = np.random.default_rng(0)
    arrays = {
        f"key{index}": generator.standard_normal((options.tasks, options.length), dtype=np.float32)
        for index in range(options.keys)
    }
    nbytes = sum(values.nbytes for values in arrays.values())
    size = settings["block_tasks"]
    blocks = [{key: values[at : at + size] for key, values in arrays.items()} for at in range(0, options.tasks, size)]
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if options.system == "ray":
        # The object store touches its memory when it starts, so that the first put need not.
        os.environ["RAY_preallocate_plasma_memory"] = "1"  # noqa: SIM112  # Ray reads this spelling
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
        rounds = run(blocks, settings, options.rounds)
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
