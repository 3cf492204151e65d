"""Runs each part that needs a GPU once, in a separate process: `make smoke-gpu`. With `--device cpu`, only the parts
that also work without a GPU are run.

Prints one JSON line for each check as it completes: its name, `ok` (null if it was skipped, with the reason),
`seconds`, and what it measured. All checks together take at most ten minutes. It runs in any environment with torch: a
check that needs a package that is not installed is skipped. The exit status is 1 if a check failed or no time was left
for it, or if no check succeeded.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.bench import own_process
from tests.bench.own_process import Measured

WHOLE_S = 580.0
"""Maximum seconds for all checks together. Checks for which no time is left are skipped."""
LIMITS_S = {
    "versions": 60.0,
    "attention": 120.0,
    "locked_memory": 60.0,
    "digests": 60.0,
    "device_memory": 60.0,
    "nccl_one_rank": 90.0,
    "megatron_one_rank": 90.0,
    "step_and_publish": 120.0,
    "utilisation": 150.0,
    "colocated_run": 180.0,
    "gpu_tests": 180.0,
}
"""The checks in order, each with its limit in seconds. They are functions of `smoke_checks`."""
WITHOUT_GPU = ("versions", "attention", "locked_memory", "digests", "step_and_publish", "utilisation")


def run(name: str, device: str, limit_s: float) -> Measured:
    """Run one check and return its line."""
    command = [sys.executable, "-m", "tests.bench.smoke_checks", name, device]
    return own_process.run(command, {"check": name}, limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.smoke_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(LIMITS_S), nargs="+", default=tuple(LIMITS_S), metavar="CHECK")
    parser.add_argument("--small", action="store_true", help="give a GPU as little work as a CPU")
    given = parser.parse_args()
    if given.small:
        os.environ[own_process.SMALL] = "1"
    chosen = {
        name: limit_s
        for name, limit_s in LIMITS_S.items()
        if name in given.only and (given.device == "cuda" or name in WITHOUT_GPU)
    }
    return own_process.run_all("check", chosen, lambda name, _, limit_s: run(name, given.device, limit_s), WHOLE_S)


if __name__ == "__main__":
    sys.exit(main())
