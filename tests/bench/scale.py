"""Simulates a run on many hosts, to measure its scheduler and supervisor: `python -m tests.bench.scale HOSTS...`.

The scheduler's state machine and the host book, both production classes, are driven by a simulated population on a
virtual clock. Processes register, send heartbeats, lease, complete and clear tasks as in a real run. Agents report, a
driver consumes steps, and 5 % of the hosts are lost at once. The CPU time inside the two state machines is measured
with garbage collection disabled. `tests.bench.connections` measures what decoding, the journal and sockets add.

The program prints a JSON object for each phase of each size: all processes joining, a steady run, and the loss of
hosts.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from proto.messages import TaskState
from tests.bench.population import Cost, Population, make_topology
from tests.bench.turns import heading, versions
from tests.sim.invariants import check_invariants

LOST_SHARE = 0.05
STARTS = ("plan the hosts", "begin")
SUPERVISORS = ("plan the hosts", "HostReport", "a host is lost")
"""Kinds of work that the supervisor does. The scheduler does all other work."""
WARM_S = 70.0
"""Simulated seconds before the measurement, by which time all processes have joined and are working."""


def measure(hosts: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the costs of a run on `hosts` hosts, over `seconds` simulated seconds before and after a loss of hosts."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.thread_time()
        topology = make_topology(Path(folder), hosts)
        load_s = time.thread_time() - began
    gc.disable()  # a garbage collection would traverse the population, too
    population = Population(topology, hosts)
    run, book = population.machine.run, population.book
    population.run_until(WARM_S)
    size = {"hosts": hosts, "processes": len(run.shards.registry)}
    start_s = {name: cost.total_s for name, cost in population.costs.items() if name in STARTS} | {"load": load_s}
    yield {"phase": "join", **size, "start_s": start_s, **_taken(population, WARM_S)}
    steps = population.steps
    population.run_until(WARM_S + seconds)
    live = sum(count for state, count in run.ledger.tasks.counts.items() if state != TaskState.COLLECTED)
    done = {"steps": population.steps - steps, "live_tasks": live, "rss_mib": psutil.Process().memory_info().rss >> 20}
    yield {"phase": "steady", **size, **done, **_taken(population, seconds)}
    lost = population.lose(LOST_SHARE)
    population.run_until(WARM_S + 2 * seconds)
    waiting = sum(row.state == "WAITING" for row in book.rows())  # including the stores of the lost hosts
    yield {
        "phase": "loss",
        **size,
        "lost_hosts": len(lost),
        "homeless": waiting - len(lost),
        **_taken(population, seconds),
    }
    check_invariants(run)


def _taken(population: Population, seconds: float) -> dict[str, Any]:
    """Return the costs since the last call, and reset them. A core is one CPU second per simulated second."""
    costs, population.costs = population.costs, defaultdict(Cost)
    cores = {"scheduler": 0.0, "supervisor": 0.0}
    kinds = {}
    for kind, cost in sorted(costs.items()):
        cores["supervisor" if kind in SUPERVISORS else "scheduler"] += cost.total_s / seconds
        kinds[kind] = {
            "a_second": round(cost.count / seconds, 1),
            "us": round(cost.total_s / cost.count * 1e6, 1),
            "longest_ms": round(cost.longest_s * 1e3, 1),
        }
    return {**{f"{name}_cores": round(value, 4) for name, value in cores.items()}, "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of a scheduler and a supervisor with many hosts, simulated.")
    parser.add_argument("hosts", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of each measurement")
    args = parser.parse_args()
    print(heading(versions(("msgspec", "numpy"))))
    for hosts in args.hosts:
        for phase in measure(hosts, args.seconds):
            print(json.dumps(phase), flush=True)


if __name__ == "__main__":
    main()
