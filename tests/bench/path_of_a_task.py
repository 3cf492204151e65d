"""Counts the files and functions of the product that six steady steps of the quickstart execute.

    python -m tests.bench.path_of_a_task [--list]

A profile function in every thread of every process of the run records the calls (`called_functions`). The last line is
"N files, M functions" over all processes, except those that launch or observe a run (`OUTSIDE`). Above it is a line
for each program. Evaluations and spare processes are off.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from tests.bench.called_functions import Function, read, recorded
from tests.bench.cluster_run import Arrival, BenchError, run_cluster

WARM_UP, STEPS = 6, 6
UNREACHED_STEPS = 1000
"""The run is stopped before it has made this many steps, so nothing of its end is recorded."""
OUTSIDE = ("launch*", *(f"services.{name}*" for name in ("exporter", "monitor", "recorder", "tracker", "web")))
"""Patterns of the programs that launch or observe a run."""


def measure(folder: Path, limit_s: float) -> dict[str, set[Function]]:
    """Run the quickstart and return the functions of six steady steps by program. Raises BenchError."""
    with recorded(folder) as (switch, environment):
        os.environ.update(environment)  # the run inherits them

        def watch(_: int, arrivals: list[Arrival]) -> None:
            switch.turn(WARM_UP <= len(arrivals) < WARM_UP + STEPS)

        run_cluster(
            UNREACHED_STEPS,
            folder,
            limit_s,
            settings=["run.spares=false"],
            watch=watch,
            enough=lambda arrivals: len(arrivals) >= WARM_UP + STEPS,
        )
    return read(folder)


def on_the_path(programs: dict[str, set[Function]]) -> set[Function]:
    """Return the functions of all programs that neither launch nor observe the run."""
    return set().union(
        *(
            functions
            for program, functions in programs.items()
            if not any(fnmatch(program, pattern) for pattern in OUTSIDE)
        )
    )


def counted(functions: set[Function]) -> str:
    return f"{len({function.file for function in functions})} files, {len(functions)} functions"


def report(programs: dict[str, set[Function]], listed: bool) -> list[str]:
    """Return the lines to print. If `listed`, they begin with each file on the path and its number of functions."""
    path = on_the_path(programs)
    files = Counter(function.file for function in path)
    lines = [f"{number:>4}  {file}" for file, number in sorted(files.items())] if listed else []
    lines += [f"{program:<32}{counted(functions)}" for program, functions in sorted(programs.items())]
    lines.append(f"{'all programs':<32}{counted(set().union(*programs.values()))}")
    return [*lines, counted(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The files and functions that six steps of the quickstart execute.")
    parser.add_argument("--list", action="store_true", help="also print each file and its number of functions")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which the run counts as failed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        try:
            programs = measure(Path(name), args.limit_s)
        except BenchError as error:
            sys.exit(f"path_of_a_task: {error}")
    print("\n".join(report(programs, args.list)))


if __name__ == "__main__":
    main()
