"""`python -m tests.sim SEED [--trace]` runs a seed; `--seeds N [--first F]` runs N seeds and shrinks the first failure.

The exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seed", type=int, nargs="?", help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="run N seeds")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="begin with this seed")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run seeds in N processes")
    parser.add_argument("--keep-going", action="store_true", help="name every failing seed instead of shrinking one")
    arguments = parser.parse_args()
    # The order of sets of names depends on the hash seed, which must therefore be fixed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", "tests.sim", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {"PYTHONHASHSEED": "0"})  # noqa: S606  # this program
    from tests.sim.runs import run_many, run_one, warm_up
    from tests.sim.virtual import surroundings

    with (
        tempfile.TemporaryDirectory(prefix="rlbus-sim-", dir="/dev/shm") as folder,
        surroundings(loud=arguments.trace),
    ):
        warm_up(Path(folder))
        gc.collect()
        gc.freeze()
        gc.disable()
        if arguments.seed is not None:
            return run_one(arguments.seed, Path(folder), tracing=arguments.trace)
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        return run_many(seeds, Path(folder), jobs=arguments.jobs, keep_going=arguments.keep_going)


if __name__ == "__main__":
    sys.exit(main())
