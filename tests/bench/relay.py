"""Measures how long a new version of the weights takes to reach every host: `python -m tests.bench.relay [--hosts 5]`.

The hosts are network namespaces behind a switch, with links of RATE MB/s in each direction. The stores and the
scheduler are the real services. The program prints how many seconds pass until one host has the version and, as a
multiple of that time, how long it takes until all hosts have it: by the relay's chain, by a binary tree, and with the
trainer's store as the only source. All hosts begin to fetch at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from proto.messages import PutTask
from shared.rundir import service_name
from tests.bench.relay_scheduler import predecessors
from tests.integration.relay_run import relay_run, same, weights_of
from tests.integration.star import Unavailable, star

LIMIT = 1.5
"""Maximum ratio between the time until all hosts have a version and the time until one host has it."""
SHAPES = {
    "chain": ("services.scheduler",),
    "tree": ("tests.bench.relay_scheduler", "tree"),
    "direct": ("tests.bench.relay_scheduler", "direct"),
}


async def seconds(folder: Path, shape: str, hosts: int, nbytes: int, rate: int, rounds: int) -> list[float]:
    """Return, for each round, how many seconds it takes until all of `hosts` hosts have the version."""
    weights = weights_of(nbytes)
    found: list[float] = []
    with (
        star(hosts + 1, rate) as machines,
        relay_run(folder, machines, memory=4 * nbytes, scheduler=SHAPES[shape]) as run,
    ):
        for host in range(1, hosts + 1):
            run.start_store(host)
        for host in range(hosts + 1):
            await run.ready(host)
            if shape == "chain":
                await run.told(host, [service_name("batch-store", each) for each in range(host - 1, 0, -1)][:2])
            elif shape == "tree":
                await run.told(host, predecessors(host))
        for number in range(rounds):
            version = PutTask(f"weights/0/{number}", 1)
            await run.put(weights, version)
            began = time.monotonic()
            taken = await asyncio.gather(*(run.take(host, version) for host in range(1, hosts + 1)))
            found.append(max(each for _, each in taken))
            if not all(same(arrays, weights) for arrays, _ in taken):
                raise SystemExit(f"{shape}: a host has wrong weights")
            del taken
            print(f"{shape}, {hosts} hosts: {found[-1]:.2f} s ({time.monotonic() - began:.2f} s with the comparison)")
            for host in range(hosts + 1):
                await run.clear(host, version)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--mb", type=int, default=96, help="size of the version in MB")
    parser.add_argument("--rate", type=int, default=12, help="rate of each link in MB/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args(words)
    nbytes, rate = options.mb * 1_000_000, options.rate * 1_000_000

    def median(shape: str, hosts: int) -> float:
        with tempfile.TemporaryDirectory(prefix="rlbus-relay-") as folder:
            found = asyncio.run(seconds(Path(folder), shape, hosts, nbytes, rate, options.rounds))
        return statistics.median(found)

    with contextlib.suppress(Unavailable):
        one = median("chain", 1)
        ratios = {shape: median(shape, options.hosts) / one for shape in options.shapes}
        print(f"{options.mb} MB on links of {options.rate} MB/s: {one:.2f} s to one host")
        for shape, ratio in ratios.items():
            print(f"  {shape}: {ratio:.2f} times that to {options.hosts} hosts")
        return int(ratios.get("chain", 0.0) > LIMIT)
    print("network namespaces are not permitted here")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
