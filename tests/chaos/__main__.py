"""Disturbs deterministic runs for a given number of minutes, and compares each with an undisturbed run: `make chaos
MINUTES=10`.

Prints every disturbance and, at the end, the kills and recovery times of each service, parity and violations. `--seed`
repeats the draws of an earlier invocation. The exit status is 1 if a promise was broken. Needs root to mount file
systems of limited size.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from shared.topology.models import CRITIC
from tests.chaos import disturbances, points, rounds
from tests.chaos.rounds import Result
from tests.integration import parity_run

POINTS = 4
"""Number of named points per launch."""
RUNS = {"GRPO": (parity_run.SMALL, CRITIC), "PPO": (parity_run.PPO, "reference")}
"""The settings of the runs that are disturbed in turn, each with the service that the run does not have."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins later than this")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round (default: a random one)")
    given = parser.parse_args()
    # A script that uses `&` or nohup may start this process with one of these signals ignored, and the launchers would
    # inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, folder {folder}", flush=True)
    begun = time.monotonic()
    references = {name: rounds.undisturbed(folder / f"undisturbed-{name}", RUNS[name][0]) for name in RUNS}
    print(f"undisturbed: {time.monotonic() - begun:.0f} s", flush=True)
    results: list[Result] = []
    while not results or time.monotonic() - begun < given.minutes * 60:
        number = len(results)
        name = list(RUNS)[(seed + number) % len(RUNS)]  # so that a seed repeats its round
        settings, absent = RUNS[name]
        services = tuple(service for service in disturbances.SERVICES if service != absent)
        processes = [disturbances.SERVICES[service] for service in services]
        print(f"round {number + 1}, seed {seed + number}: {name}", flush=True)
        here = folder / f"round-{number}"
        results.append(
            rounds.disturbed(
                here,
                seed + number,
                disturbances.ROUGH,
                reference=references[name],
                points=lambda chance, marks, processes=processes: points.drawn(chance, marks, POINTS, processes),
                settings=settings,
                services=services,
                before=sum((each.done for each in results), Counter[str]()),
                say=lambda text: print(text, flush=True),
            )
        )
        for violation in results[-1].violations:
            print(f"  VIOLATION: {violation}", flush=True)
    show(results, time.monotonic() - begun)
    if any(result.violations for result in results):
        return 1
    shutil.rmtree(folder)
    return 0


def show(results: list[Result], wall_s: float) -> None:
    print(f"\n{len(results)} rounds, {sum(each.launches for each in results)} launches, {wall_s:.0f} s")
    kills = sum((each.kills for each in results), Counter[str]())
    print(f"\n{'service':<24}{'kills':>6}{'recovered':>11}{'median s':>10}{'longest s':>11}")
    for service in disturbances.SERVICES:
        times = [seconds for each in results for seconds in each.recoveries.get(service, [])]
        shown = f"{statistics.median(times):>10.1f}{max(times):>11.1f}" if times else ""
        print(f"{service:<24}{kills[service]:>6}{len(times):>11}{shown}")
    print("\n(recovered: seconds from a kill to the next commit seen; others may have been killed in the meantime)")
    done = sum((each.done for each in results), Counter[str]())
    print("disturbances: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in done.most_common()))
    compared = [each.parity for each in results if each.parity is not None]
    print(f"parity: {sum(compared)} of {len(compared)} completed runs are bit-identical to the undisturbed run")
    print(f"violations: {sum(len(each.violations) for each in results)}")
    for result in results:
        for violation in result.violations:
            print(f"  seed {result.seed}: {violation.splitlines()[0]}")


if __name__ == "__main__":
    sys.exit(main())
