"""What TransferQueue's SimpleStorage and Ray's object store do with the same data; prints one JSON line a system.

Runs in an environment of its own (`make peers-data`, lock beside this file). Same work as `tests.bench.bench_data`:
`tasks` tasks of `keys` float32 tensors of `length`, put, got back, and every byte read (xxh3, as there).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time

import numpy as np
import torch
from xxhash import xxh3_64_intdigest as digest


def transfer_queue(arrays: dict[str, np.ndarray], rounds: int) -> list[dict[str, float]]:
    """One `kv_batch_put` of all tasks, one `kv_batch_get`, as its own performance test does; two units (default)."""
    import transfer_queue as tq
    from tensordict import TensorDict

    tq.init()
    tasks = len(next(iter(arrays.values())))
    results = []
    for number in range(rounds):
        names = [f"{number}_{task}" for task in range(tasks)]
        fields = TensorDict({key: torch.from_numpy(values) for key, values in arrays.items()}, batch_size=tasks)
        began = time.perf_counter()
        tq.kv_batch_put(keys=names, partition_id="bench", fields=fields)
        put = time.perf_counter() - began
        began = time.perf_counter()
        back = tq.kv_batch_get(keys=names, partition_id="bench")
        bare = time.perf_counter() - began
        # fields come back as nested tensors: taken apart once, because back[key][task] takes all of it apart each time
        sums = [digest(row.numpy()) for key in arrays for row in back[key].unbind()]
        get = time.perf_counter() - began
        if sums != [digest(row) for values in arrays.values() for row in values]:
            raise ValueError("what came back is not what was put")
        tq.kv_clear(keys=names, partition_id="bench")
        results.append({"put_s": put, "get_s": bare, "get_read_s": get})
    tq.close()
    return results


def ray_store(arrays: dict[str, np.ndarray], rounds: int) -> list[dict[str, float]]:
    """One object a task (a dict of its tensors), all put, all got, every byte read."""
    import ray

    tasks = len(next(iter(arrays.values())))
    results = []
    for _ in range(rounds):
        began = time.perf_counter()
        references = [ray.put({key: values[task] for key, values in arrays.items()}) for task in range(tasks)]
        put = time.perf_counter() - began
        began = time.perf_counter()
        sums = [digest(values) for one in ray.get(references) for values in one.values()]
        get = time.perf_counter() - began
        if sums != [digest(values[task]) for task in range(tasks) for values in arrays.values()]:
            raise ValueError("what came back is not what was put")
        del references
        results.append({"put_s": put, "get_read_s": get})
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=1024)
    parser.add_argument("--keys", type=int, default=9)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    arrays = {
        f"key{index}": generator.standard_normal((options.tasks, options.length), dtype=np.float32)
        for index in range(options.keys)
    }
    nbytes = sum(values.nbytes for values in arrays.values())
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=4,
            object_store_memory=max(4 * nbytes, 200 << 20),
            include_dashboard=False,
            _temp_dir=folder,
            namespace="bench",
            log_to_driver=False,
        )
        for name, run in (("ray object store", ray_store), ("TransferQueue SimpleStorage", transfer_queue)):
            print(json.dumps({"system": name, "bytes": nbytes, "rounds": run(arrays, options.rounds)}), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
