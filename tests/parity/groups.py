"""Runs one function on every rank of a real process group, each rank a process: `python -m tests.parity.groups`.

A function is named `module:function`, takes (place, folder) and leaves what it found as `<folder>/rank-<r>/...`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from services.policy_trainer.layout import Layout
from services.policy_trainer.sums import add_up

SUM = "sum/"
LIMIT_S = 240.0
COLLECTIVE_S = 60.0


def sums_of(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """What all ranks counted, as the driver puts it together; `parts` by rank, with entries named `sum/<name>`."""
    totals: dict[str, float] = {}
    for part in parts:
        add_up(totals, {name.removeprefix(SUM): value for name, value in part.items() if name.startswith(SUM)})
    return totals


def run_group(function: str, layout: Layout, folder: Path) -> None:
    """Start `layout.world_size` processes and wait for them; a rank that fails fails the test with its output."""
    folder.mkdir(parents=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    processes = []
    for rank in range(layout.world_size):
        degrees = [str(each) for each in (layout.world_size, layout.tp, layout.pp, layout.cp, rank)]
        (folder / f"rank-{rank}").mkdir()
        output = (folder / f"rank-{rank}.txt").open("wb")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.parity.groups", function, str(folder), *degrees],
                stdout=output,
                stderr=output,
                env=environment,
            )
        )
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    for rank, process in enumerate(processes):
        said = (folder / f"rank-{rank}.txt").read_text()
        assert process.returncode == 0, f"rank {rank} of {layout}:\n{said[-4000:]}"


def main() -> None:
    import torch.distributed as dist

    from services.policy_trainer.worker.mesh import open_group

    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("folder", type=Path)
    for name in ("world_size", "tp", "pp", "cp", "rank"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    place = Layout(given.world_size, given.tp, given.pp, given.cp).place(given.rank)
    module, _, function = given.function.partition(":")
    work = getattr(importlib.import_module(module), function)
    open_group(given.folder / "group", place, "cpu", deadline_s=COLLECTIVE_S)
    work(place, given.folder)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as the worker ends: the interpreter's teardown may meet threads of gloo that still run, and abort


if __name__ == "__main__":
    main()
